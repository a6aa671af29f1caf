"""Kernels that only a GPU can judge: each beside what the package has today, with the figure that is expected of it. A
variant enters the package with the measurement that shows it faster, or goes."""
