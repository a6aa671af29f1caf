"""One step: the rows that each rank computes, their tensors, and CUDA graphs of decode steps."""
