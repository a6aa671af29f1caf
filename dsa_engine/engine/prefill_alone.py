"""A prefill of one prompt while nothing else runs: for measuring it, and for the logits of all its positions."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.scheduler import Scheduler
from dsa_engine.sampling_params import SamplingParams


def chunks_alone(scheduler: Scheduler, prompt: list[int], bar: Any) -> Generator[Chunk, None, None]:
    """The chunks of a prompt's prefill, each to be run before the next is asked for; nothing is left of it afterwards.

    Meant for a loop in an ``uninterrupted`` block, in which only what computes a chunk is interrupted.

    Args:
        bar: a progress bar over the tokens.

    Raises:
        RuntimeError: other requests are on their way.
        CapacityError: it does not fit in the cache.
    """
    if scheduler.has_work:
        raise RuntimeError("the engine is busy with other requests; finish them first")
    request = Request(-1, prompt, SamplingParams(max_tokens=1))
    try:
        scheduler.add(request)
        while not request.prefilled:
            chunks = scheduler.schedule()
            yield chunks[0]
            scheduler.computed(chunks)
            bar.update(chunks[0].length)
    finally:
        request.finish_reason = "length" if request.prefilled else "abort"
        scheduler.finish(request)
