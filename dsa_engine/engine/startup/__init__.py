"""From options to an engine: weights, checked kernels, memory, graphs."""
