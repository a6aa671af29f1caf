"""``dsa-engine plan``: the best use of some devices for a model and its requests, modelled roughly."""
