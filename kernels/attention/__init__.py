"""Attention over the latent cache and over expanded keys and values, and what merges and gathers for it."""
