"""Runs steps of requests whose pages lie anywhere on the ranks of their group: context_worker.py CASES.json FOLDER;
:func:`run_case` in one process.

A case has ``name``, ``folder``, ``options`` (of ``LLM``), ``parallel``, ``lengths`` (of prompts, one for each request),
``chunk`` (tokens of a request in a prefill step), ``hits`` (tokens of the first prompt that later ones begin with and
find), ``skew`` (how often a page is one of rank 0), ``decodes`` (steps, each of up to ``rows`` tokens of a request),
``padded``, and ``spilled``, how many pages of a rank are, beside ``resident`` ones. MTP modules run over the rows of
prompts; their states count as logits of positions after 10,000 each.
"""

from __future__ import annotations

import json
import os
import random
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.engine.cache.ledger import even_pages
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import DecodeStep, Samples
from dsa_engine.engine.requests.scheduler import Step
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.model.kv_cache import KVCache

Logits = dict[tuple[int, int], torch.Tensor]  # by request and position


HOT_ROWS = 48  # of a request: those that 3 rows may select


class Pages:
    """Gives out pages of a group of ranks in random order."""

    def __init__(self, pages: int, ranks: int, rng: random.Random, skew: float):
        self._rng, self._skew, self._ranks = rng, skew, ranks
        self._free = [[page * ranks + rank for page in rng.sample(range(pages), pages)] for rank in range(ranks)]

    def take(self, count: int, below: int | None = None) -> list[int]:
        """``below``: the local numbers that may be taken; None: all."""
        ranks = [
            0 if self._rng.random() < self._skew and self._free[0] else self._rng.randrange(self._ranks)
            for _ in range(count)
        ]
        limit = sys.maxsize if below is None else below * self._ranks
        of_ranks = [self._free[rank] for rank in ranks]
        return [free.pop(max(i for i, page in enumerate(free) if page < limit)) for free in of_ranks]


def run_case(case: dict[str, Any]) -> Logits:
    """The logits after each row that this rank computes, of the last of each prompt and all that decode."""
    parallel = ParallelConfig(**case["parallel"])
    engine = LLM(case["folder"], parallel=parallel, **case["options"]).engine
    mesh, cache, result = engine.mesh, engine.cache, Logits()
    size = cache.page_size
    if spilled := case.get("spilled", 0):
        config = engine.model.config.with_mtp(len(engine.model.mtp))
        cache = KVCache(
            config, cache.format, case["resident"], size, mesh.device, mesh.dcp, spilled, len(case["lengths"]), HOT_ROWS
        )
        engine.runner = replace(engine.runner, cache=cache, graphs=None)
    rng, groups = random.Random(case["name"]), mesh.world_size // mesh.dcp.size
    if case.get("padded"):
        engine.runner.graphs = DecodeGraphs(
            engine.model, engine.cache, capture=False, contexts=ContextBuckets(fewest=32)
        )
    ids = [[rng.randrange(200) for _ in range(length + 64)] for length in case["lengths"]]
    pages, skew = cache.pages + cache.spilled, case.get("skew", 0.0)
    pools = [Pages(pages, mesh.dcp.size, random.Random(g), skew) for g in range(groups)]
    own, requests = mesh.rank // mesh.dcp.size, list[Request]()
    for number, length in enumerate(case["lengths"]):
        hits = case.get("hits", 0) if number and length > case.get("hits", 0) else 0
        ids[number][:hits] = ids[0][:hits]
        request = Request(number, ids[number][:length], SamplingParams(max_tokens=64), hot_set=number)
        request.owner = number % mesh.world_size
        request.cp_group = request.owner // mesh.cp_size
        for group, pool in enumerate(pools):
            if group * mesh.dcp.size // mesh.cp_size != request.cp_group:
                continue
            shared = requests[0].pages[: hits // size] if number and requests[0].cp_group == request.cp_group else []
            last = (length - 1) // size  # a page that decode steps write is resident
            below = cache.pages if case["decodes"] else None
            new = pool.take(last - len(shared)) + pool.take(pages_for(length + 64, size) - last, below)
            if group == own:
                request.pages = array("i", [*shared, *new])
        request.num_computed_tokens = hits if requests and requests[0].cp_group == request.cp_group else 0
        requests.append(request)

    def run(step: Step) -> None:
        plan = engine.runner.plan(step)
        with torch.inference_mode():
            batch, hidden = engine.runner.forward(plan)
            logits = engine.runner.sampled_logits(plan, hidden)
            for module in range(len(engine.model.mtp) if plan.decode is None else 0):
                hidden, _ = engine.model.draft(module, hidden, batch, engine.runner.cache)
                for s in plan.own.segments:
                    last = (module + 1) * 10_000 + s.end - 1
                    result[plan.own.chunks[s.sequence].request.id, last] = hidden[s.row + s.length - 1].clone()
        for row, (request, position, _) in zip(logits, plan.own.wanted, strict=True):
            result[request.id, position] = row.clone()

    for request in requests[:1], requests[1:]:
        while chunks := _chunks(engine, request, case["chunk"]):
            run(Step(chunks))
            for chunk in chunks:
                chunk.request.num_computed_tokens = chunk.end
    requests.sort(key=lambda request: (request.owner, request.id))
    for number in range(case["decodes"]):
        counts = np.array([1 + (request.id + number) % case.get("rows", 1) for request in requests], np.int64)
        starts = np.array([len(request) for request in requests], np.int64)
        for request, count in zip(requests, counts.tolist(), strict=True):
            request.output += ids[request.id][len(request) : len(request) + count]
        owners = np.array([request.owner for request in requests])
        chunks = [
            Chunk(request, start, count, range(request.owner, request.owner + 1), count)
            for request, start, count in zip(requests, starts.tolist(), counts.tolist(), strict=True)
            if request.owner in mesh.dcp.ranks
        ]
        samples = Samples.by_rank(np.arange(len(requests)), owners, counts, mesh.world_size, -1)
        least = max(even_pages(chunk.request.pages, mesh.dcp.size) for chunk in chunks) * size
        run(Step(chunks, DecodeStep(chunks, samples, starts, 0, 0, least)))
    return result


def _chunks(engine: Engine, requests: list[Request], longest: int) -> list[Chunk]:
    chunks = []
    for request in requests:
        start, ranks = request.num_computed_tokens, engine.mesh.cp_ranks(request.cp_group)
        if length := min(longest, len(request.prompt) - start):
            chunks.append(Chunk(request, start, length, ranks))
    return chunks


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {case["name"]: run_case(case) for case in cases}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
