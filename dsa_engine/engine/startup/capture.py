"""Captures the likely decode steps as CUDA graphs before the first request; others are captured when they occur."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.startup.dummy_steps import GREEDY, decode_step
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh


def likely_buckets(mesh: Mesh, options: EngineOptions, max_model_len: int, num_drafts: int) -> list[tuple[int, int]]:
    """Requests of a rank and context of the steps to capture, the largest first, as smaller graphs reuse its memory.

    These are any number of requests, divided evenly over the ranks, or the numbers in ``cudagraph_capture_sizes``; each
    with any context: to capture in the middle of serving, all requests wait.
    """
    contexts = ContextBuckets(max_model_len, options.page_size).all(num_drafts)
    sizes = options.cudagraph_capture_sizes
    if sizes is None:
        sizes = [1 << i for i in range(next_power_of_2(cdiv(options.max_num_seqs, mesh.world_size)).bit_length())]
    return sorted({(next_power_of_2(size), context) for size in sizes for context in contexts}, reverse=True)


def capture_likely(
    runner: ModelRunner,
    mesh: Mesh,
    options: EngineOptions,
    max_model_len: int,
    progress: Callable[[int, str, str], Any],
) -> None:
    """Captures the graphs of :func:`likely_buckets` by running a dummy step of each; every rank calls it."""
    buckets = likely_buckets(mesh, options, max_model_len, runner.num_drafts)
    with progress(len(buckets), "graphs", "capturing") as bar:
        for requests, context in buckets:
            chunks = decode_step(mesh, options.page_size, requests, context, runner.num_drafts, GREEDY)
            runner.launch(runner.plan(chunks)).read()
            bar.update(1)
