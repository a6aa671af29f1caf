"""Runs requests on a model: an engine, its loop, and rooms for requests, steps, sampling, speculation and startup."""
