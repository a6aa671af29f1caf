"""The model: what each layer computes, as in the papers, its caches, and one rank's batch of a step."""
