"""The rows of a step: segments, norms, rotation, gating, and storing of rows in paged pools."""
