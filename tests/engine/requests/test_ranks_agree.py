"""Ranks of a large world take the same decisions, each for itself: real engines, with a model that computes nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import ReadSamples, StepResult
from dsa_engine.sampling_params import SamplingParams
from host_world import host_world

RANKS, WORLD, PAGE, PAGES = (0, 1, 63), 64, 4, 14
VARIANTS: dict[str, dict[str, Any]] = {
    "one group, ahead": {},
    "each rank alone, no prefix cache": {"cp_size": 1, "enable_prefix_caching": False},
    "drafts": {"cp_size": 32, "drafts": 2},
}


@pytest.fixture
def engines(
    request: pytest.FixtureRequest, demo_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Engine]]:
    """Engines of some ranks, whose every token is 0: what an emulated rank takes for the tokens of others."""
    options = {"pages": PAGES, "page_size": PAGE, "max_num_batched_tokens": 4, "max_prefill_share": 0.5}
    options |= {"enable_prefix_caching": True, "max_num_seqs": 300} | VARIANTS[request.param]
    with ExitStack() as stack:
        worlds = [stack.enter_context(host_world(WORLD, 0, 0, rank=rank, **options)) for rank in RANKS]
        for world in worlds:
            world.model.token = 0
            if world.engine.runner.drafter is not None:
                # What an emulated rank gathers of others' drafts is made up: all engines read the same instead.
                world.engine.runner.graphs, world.engine.async_scheduling = None, False
                monkeypatch.setattr(StepResult, "read", read)
        yield [world.engine for world in worlds]


def read(step: StepResult) -> ReadSamples:
    """As if some of each request's drafts had been accepted, here and there all of them."""
    samples, none = step.samples, np.zeros((len(step.samples.keys), 3), np.int64)
    accepted = (samples.keys * 7 + samples.counts.sum()) % samples.counts
    return ReadSamples(samples, none, None, samples.counts - 1, accepted, none[:, :2])


@pytest.mark.parametrize("engines", VARIANTS, ids=str, indirect=True)
def test_ranks_agree_on_owners_pages_and_requests(engines: list[Engine]) -> None:
    """Random arrivals and ends; prompts with a common beginning; caches too small for all requests."""
    rng, alive, number = random.Random(0), dict[int, list[Request]](), 0
    step, hits, counts = 0, 0, set[int]()
    while step < 30 or engines[0].has_work:
        step += 1
        for _ in range(rng.randint(0, 12) if step < 30 else 0):
            prompt = [5, 6, 7, 8, 9, 10, 11, 12][: rng.choice([0, 4, 8])] + [rng.randrange(64) for _ in range(9)]
            params = SamplingParams(max_tokens=rng.choice([3, 20, 40]), temperature=0.0, ignore_eos=True)
            alive[number] = [engine.add(list(prompt), params) for engine in engines]
            number += 1
        if alive and rng.random() < 0.3:
            leaves = alive[rng.choice(list(alive))]
            for engine, copy in zip(engines, leaves, strict=True):
                engine.finish(copy, "abort")
        if (running := engines[0].scheduler.running) and rng.random() < 0.2:
            loses = rng.choice(running).id
            for engine in engines:
                engine.scheduler.preempt(next(one for one in engine.scheduler.running if one.id == loses))
        for engine in engines:
            engine.step()
        states = [state(engine, alive, index) for index, engine in enumerate(engines)]
        assert states[1] == states[0] and states[2] == states[0], f"ranks disagree after step {step}"
        for engine, rank in zip(engines, RANKS, strict=True):
            own = {page for copies in alive.values() for page in copies[RANKS.index(rank)].pages}
            assert engine.scheduler.free_pages[rank] == PAGES - len(own)
        ended = [copies for copies in alive.values() if copies[0].finish_reason is not None]
        hits += sum(copies[0].num_cached_tokens or 0 for copies in ended)
        counts |= {count for copies in ended for _, count in copies[0].draft_stats}
        alive = {n: copies for n, copies in alive.items() if copies[0].finish_reason is None}
    assert all(engine.scheduler.free_pages == [PAGES] * WORLD for engine in engines)
    assert number > 100 and engines[0].scheduler.preemptions > 3
    assert (hits > 0) == engines[0].options.enable_prefix_caching
    assert counts == ({0, 1, 2} if engines[0].runner.num_drafts else set())


def state(engine: Engine, alive: dict[int, list[Request]], index: int) -> dict[str, Any]:
    """The decisions of one rank; ``index`` is its number among the copies of a request."""
    scheduler = engine.scheduler
    return {
        "running": [request.id for request in scheduler.running],
        "waiting": [request.id for request in scheduler.waiting],
        "owners": {n: copies[index].owner for n, copies in alive.items()},
        "ended": {n: copies[index].finish_reason for n, copies in alive.items()},
        "free": list(scheduler.free_pages),
        "preemptions": scheduler.preemptions,
        "hits": scheduler.prefix_cache.hits,
    }
