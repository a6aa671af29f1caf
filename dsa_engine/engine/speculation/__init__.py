"""Speculative decoding: tokens are drafted by MTP modules and verified by the model, eagerly or as one graph."""
