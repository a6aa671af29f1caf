"""Attention over the latent cache, dense and sparse, and over expanded keys and values; merging of partial results and
gathering of latent rows."""
