"""Compiled kernels without a GPU: registers, spills, shared memory, and a bound of the inner loop from SASS."""
