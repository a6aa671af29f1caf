"""Requests: how they arrive, which of their tokens are computed next, and which pages they hold."""
