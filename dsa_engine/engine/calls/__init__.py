"""Calls of the engine: the messages, their one way to the loop on all ranks, and what comes back to the caller."""
