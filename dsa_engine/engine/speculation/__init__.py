"""Speculative decoding: MTP modules draft tokens and the model verifies them, eagerly or in one graph."""
