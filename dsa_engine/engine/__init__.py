"""Requests on their way: scheduler, pages, step metadata, runner, CUDA graphs, sampler."""
