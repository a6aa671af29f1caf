"""A scheduler without a model: its steps as chunks of all ranks, and tokens that a test chooses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import ReadSamples, Samples
from dsa_engine.engine.requests.scheduler import Scheduler, Step


def chunks_of(scheduler: Scheduler, step: Step) -> list[Chunk]:
    """The chunks of all ranks in a step, in order of arrival."""
    if step.decode is None:
        return step.chunks
    samples, starts = step.decode.samples, step.decode.starts.tolist()
    requests = scheduler.decoding.requests_of(samples)
    numbers = zip(starts, samples.counts.tolist(), samples.ranks.tolist(), strict=True)
    chunks = [
        Chunk(request, start, count, range(rank, rank + 1), count)
        for request, (start, count, rank) in zip(requests, numbers, strict=True)
    ]
    return sorted(chunks, key=lambda chunk: chunk.request.id)


def launch(scheduler: Scheduler, step: Step) -> Samples | None:
    """Launches a step; returns what it samples."""
    samples = None if step.decode is None else step.decode.samples
    if step.decode is None and (last := [chunk.request for chunk in step.chunks if chunk.num_logits]):
        last.sort(key=lambda request: request.owner)
        owners = [request.owner for request in last]
        samples = Samples.of(last, owners, [1] * len(last), scheduler.capacity.world_size)
    scheduler.launched(step, samples)
    return samples


def read(scheduler: Scheduler, samples: Samples | None, token: Callable[[Request], int]) -> None:
    """Reads a step whose requests get the tokens that ``token`` chooses; ends those that have all of theirs."""
    if samples is None:
        return
    remaining = scheduler.decoding.requests_of(samples)
    tokens = {(request.owner << 40) + request.id: token(request) for request in remaining}
    chosen = np.array([[tokens.get(key, 0)] for key in samples.keys.tolist()], np.int64).reshape(-1, 1)
    taken, _ = scheduler.decoding.take(ReadSamples(samples, chosen))
    for request, new, *_ in taken:
        for one in new:
            if request.append(one, ()) is not None:
                request.finish_reason = "length"
                scheduler.finish(request)


def run_step(scheduler: Scheduler, token: Callable[[Request], int]) -> list[tuple[int, int, int]]:
    """Runs a step as the engine does; returns ``(request, start, length)`` of its chunks."""
    step = scheduler.schedule()
    chunks = [(c.request.id, c.start, c.length) for c in chunks_of(scheduler, step)]
    read(scheduler, launch(scheduler, step), token)
    return chunks
