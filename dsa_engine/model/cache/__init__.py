"""Pages that travel: between device and host memory, and between the ranks of a context-parallel group."""
