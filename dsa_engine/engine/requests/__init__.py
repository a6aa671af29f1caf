"""Requests: how they arrive, which tokens of them are computed next, which pages they hold."""
