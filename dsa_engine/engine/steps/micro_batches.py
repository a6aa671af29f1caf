"""Cuts a step into two micro-batches: the attention of one runs while the tokens of the other travel to experts.

The chunks of each group of ranks are cut at half of their rows. A chunk of a prefill that crosses is cut itself, and
each part is divided over the ranks as a chunk is: so one long prompt is cut too. The first micro-batch passes each
layer first, which keeps the order of positions. The cut follows from the plan alone, so all ranks cut alike.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import DecodeStep
from dsa_engine.engine.steps.plan import RankPlan, StepPlan
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh


@dataclass(frozen=True)
class MicroBatches:
    """The steps that are cut: those in which a rank has at least this number of rows.

    ``DSA_ENGINE_DBO_ROWS``, by default "32,512", has other numbers for decode and prefill.
    """

    decode_rows: int
    prefill_rows: int

    @classmethod
    def of(cls, options: EngineOptions, mesh: Mesh) -> MicroBatches | None:
        """None if no step is cut: the option is off, or there is one rank and nothing travels."""
        if not options.enable_dbo or mesh.world_size == 1:
            return None
        decode_rows, prefill_rows = map(int, os.environ.get("DSA_ENGINE_DBO_ROWS", "32,512").split(","))
        return cls(decode_rows, prefill_rows)

    def cut(self, step: StepPlan, config: ModelConfig) -> StepPlan:
        """The step with its micro-batches, or as it is."""
        if step.rows.max() < (self.decode_rows if step.decodes else self.prefill_rows):
            return step
        if step.bucket is not None:
            return replace(step, bucket=replace(step.bucket, is_cut=step.bucket.requests > 1))
        if step.decode is not None:
            return _cut_decode(step, step.decode, config)
        first, second = cut_chunks(step.chunks, step.decodes)
        if not (any(chunk.length for chunk in first) and second):
            return step
        cuts = _cuts(first, second)
        if step.cuts != cuts:
            whole = StepPlan.of(step.chunks, step.rank, len(step.rows), config, cuts=cuts)
            step = replace(whole, decodes=step.decodes)
        return replace(step, micro_batches=(step.part(first, after=False), step.part(second, after=True)))

    def cuts(self, chunks: Sequence[Chunk], max_decode_rows: int) -> dict[Request, int]:
        """Where a step is cut that is sure to be, so that it is divided once; empty where the rows of ranks decide."""
        rows: Counter[range] = Counter()
        for chunk in chunks:
            rows[chunk.ranks] += chunk.length
        decodes = all(chunk.length <= max_decode_rows for chunk in chunks)
        if decodes or max(count / len(ranks) for ranks, count in rows.items()) < self.prefill_rows:
            return {}
        return _cuts(*cut_chunks(chunks, whole=False))


def _cuts(first: Sequence[Chunk], second: Sequence[Chunk]) -> dict[Request, int]:
    begun = {chunk.request for chunk in first}
    return {chunk.request: chunk.start for chunk in second if chunk.request in begun}


def cut_chunks(chunks: Sequence[Chunk], whole: bool) -> tuple[list[Chunk], list[Chunk]]:
    """The chunks of both micro-batches; ``whole``: one that crosses is not cut, and belongs to the first."""
    remaining: dict[range, int] = {}
    for chunk in chunks:
        remaining[chunk.ranks] = remaining.get(chunk.ranks, 0) + chunk.length
    remaining = {ranks: (rows + 1) // 2 for ranks, rows in remaining.items()}
    first, second = [], []
    for chunk in chunks:
        length = min(chunk.length, remaining[chunk.ranks])
        if whole and length:
            length = chunk.length
        remaining[chunk.ranks] = max(0, remaining[chunk.ranks] - length)
        rest = chunk.length - length
        # Logits are those of the whole step, not of a micro-batch.
        if length or not rest:
            first.append(replace(chunk, length=length, num_logits=0))
        if rest:
            second.append(replace(chunk, start=chunk.start + length, length=rest, num_logits=0))
    return first, second


def _cut_decode(step: StepPlan, decode: DecodeStep, config: ModelConfig) -> StepPlan:
    """The requests of each rank that begin in the first half of its rows, and the others."""
    samples, world = decode.samples, len(step.rows)
    first = samples.first < ((step.rows + 1) // 2)[samples.ranks]
    own = first[samples.of_rank(step.rank)]

    def of(chosen: np.ndarray, own: np.ndarray) -> StepPlan:
        rows = np.bincount(samples.ranks[chosen], samples.counts[chosen], world).astype(np.int64)
        chunks = [replace(chunk, num_logits=0) for chunk, mine in zip(decode.chunks, own.tolist(), strict=True) if mine]
        plan = RankPlan.of_decode(chunks, config)
        return StepPlan(step.rank, plan, rows, step.decodes)

    return replace(step, micro_batches=(of(first, own), of(~first, ~own)))
