"""One step: which rank computes which rows, as tensors, and as CUDA graphs."""
