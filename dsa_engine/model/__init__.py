"""What a layer computes, as in the papers: configuration, attention, indexer, experts, caches."""
