"""Pages: which there are, where their rows are, and their bytes on the way to host memory, other ranks and the disk."""
