"""Quality of the demo model: retrieval, perplexity, drafts, and what its indexer selects."""
