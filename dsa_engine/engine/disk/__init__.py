"""Pages of prompts on the disk: their files and folder, and what reads and writes them beside the steps."""
