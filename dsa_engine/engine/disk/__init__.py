"""Pages of prompts on a disk, for later runs and other processes."""
