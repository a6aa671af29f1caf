"""Counted work of a step: operations and bytes, from the configuration and the weights of a rank.

* `work.py`: operations and bytes of every stage of one layer, for the rows that a rank computes
* `weights.py`: bytes of a rank's weights, by layer and stage
* `model_costs.py`: a forward pass, a decode step with its drafts, a prefill
"""
