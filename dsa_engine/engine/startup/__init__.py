"""From options to an engine: weights, check of kernels, memory, graphs."""
