"""Linear layers: plain, FP8 by blocks, INT8, INT4, and the product with one matrix for each head."""
