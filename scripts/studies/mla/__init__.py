"""Ways to compute Multi-head Latent Attention, compared: each gives the same numbers and reads other bytes."""
