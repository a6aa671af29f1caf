"""Prompts and requests to measure with: random tokens, or, for decode alone, caches filled with random rows."""

from __future__ import annotations

import random
from dataclasses import replace

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.limits import Capacity, new_requests, pages_for
from dsa_engine.engine.requests.request import Request
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.sampling_params import SamplingParams


def random_prompt(engine: Engine, length: int, seed: int = 0) -> list[int]:
    """``length`` random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(engine.config.vocab_size) for _ in range(length)]


def add_filled(engine: Engine, count: int, length: int, params: SamplingParams) -> list[Request]:
    """``count`` requests with ``length`` prompt tokens and random cache rows, which decode from the next step on. Their
    tokens mean nothing. Raises as :meth:`.engine.Engine.add`, and ``CapacityError`` if there is no room right now."""
    (add,) = new_requests([0] * length, params, None, engine.limits)
    requests = []
    for _ in range(count):
        request = engine.make_request(replace(add, id=next(engine.ids)))
        request.output.append(0)  # the token that a prefill would have sampled
        engine.scheduler.admit_prefilled(request)
        size, rank = engine.scheduler.capacity.dcp_size, engine.mesh.rank
        if own := [page // size for page in request.pages if page % size == rank % size]:
            engine.cache.fill_random(own, engine.options.seed + request.id)
        requests.append(request)
    return requests


def check_batch(capacity: Capacity, requests: int, prompt_len: int, max_tokens: int, filled: bool = False) -> None:
    """Raises ``CapacityError`` if so many requests of this size, divided evenly over the ranks, cannot run at once
    without preemption. ``filled``: they are not prefilled."""
    each = cdiv(requests, capacity.world_size // capacity.dcp_size)
    need = each * capacity.max_pages(prompt_len, max_tokens)
    if requests > 1 and capacity.cp_size > capacity.dcp_size and not filled:
        need += pages_for(prompt_len, capacity.page_size)  # for a request of others during its prefill
    together = "each" if capacity.dcp_size == 1 else f"each {capacity.dcp_size} together"
    what = f"{requests} such requests at once on {capacity.world_size} rank(s), {each} on {together}"
    capacity.check(prompt_len, max_tokens, what, need)
