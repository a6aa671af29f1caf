"""Runs whose ranks have roles: some prefill, the others decode."""
