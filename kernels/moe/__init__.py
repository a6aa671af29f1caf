"""The mixture of experts: routing, packing and ordering of tokens, the experts, the weighted sum."""
