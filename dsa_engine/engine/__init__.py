"""Runs requests on a model: an engine, its loop, and rooms for calls, requests, steps, sampling, drafts and startup."""
