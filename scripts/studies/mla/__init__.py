"""Forms of Multi-head Latent Attention compared: they give the same numbers and differ in cached bytes and work."""
