"""What is done to the rows of a step: norms, rotation, gating, and the rows of paged pools."""
