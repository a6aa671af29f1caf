"""Counted work of a step: operations and bytes, from the configuration and the weights of a rank."""
