"""A prefill of one prompt, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from dsa_engine.commands.bench.result import Result
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.measure.across_ranks import agree_on_prompts, barrier, from_all_ranks
from dsa_engine.measure.costs.model_costs import prefill_plans_of
from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.stage_timer import StageTimer


@dataclass(frozen=True, kw_only=True)
class PrefillResult(Result):
    """A measured prefill. Lists have one value per rank; in an emulated run, only that rank's."""

    attention_pairs: list[int]  # query-key pairs under the causal mask
    imbalance: float  # largest attention work of a rank over the mean of all ranks
    bytes_sent: list[int]  # payload put into collectives, in the watched run
    watched_seconds: float  # the watched run on the slowest rank, watching included
    logits: torch.Tensor  # float32 [vocab], after the last token; without meaning for an emulated rank

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "attention_pairs": self.attention_pairs,
            "bytes_sent": self.bytes_sent,
            "imbalance": self.imbalance,
            "watched_ms": self.watched_seconds * 1e3,
        }


def attention_pairs(plan: StepPlan) -> list[int]:
    """Query-key pairs of every rank under the causal mask."""
    return [sum(s.visible_pairs for s in plan.of_rank(rank).segments) for rank in range(len(plan.rows))]


def measure_prefill(engine: Engine, prompt: list[int], *, warmup: int = 1, repeat: int = 3) -> PrefillResult:
    """Prefills ``prompt`` ``warmup + repeat`` times, and once more; the same result on every rank.

    One context-parallel group computes it (all ranks, by default). The last run is not among the timed ones: it
    gives the times of the stages, and recording them takes time. A stage's time is that of the main stream or thread,
    with its waits for work on side streams.
    """
    mesh = engine.mesh
    agree_on_prompts(engine, [prompt])
    reset_peak(mesh.device)
    for _ in range(warmup):
        prefill(engine, prompt)
    mine = []
    for _ in range(repeat):
        barrier(engine)
        mine.append(_timed(engine, prompt)[0])
    peak = float(peak_bytes(mesh.device))
    barrier(engine)
    sent = -sum(group.bytes_sent for group in mesh.groups)
    with StageTimer(mesh.device) as timer:
        watched_seconds, logits = _timed(engine, prompt)
    sent += sum(group.bytes_sent for group in mesh.groups)
    stages = timer.seconds()
    plans = prefill_plans_of(engine, len(prompt))
    pairs = [sum(step) for step in zip(*map(attention_pairs, plans), strict=True)]
    ranks = from_all_ranks(engine, [peak, float(sent), watched_seconds, *stages.values(), *mine])
    first = 3 + len(stages)
    seconds = [max(row[first + i] for row in ranks) for i in range(repeat)]  # the slowest rank's
    return PrefillResult(
        input_len=len(prompt),
        ranks=mesh.world_size,
        ttft=seconds,
        prefill=seconds,
        peak_memory_bytes=[int(row[0]) for row in ranks],
        stages={"prefill": [dict(zip(stages, row[3:first], strict=True)) for row in ranks]},
        num_speculative_tokens=engine.runner.num_drafts,
        attention_pairs=[pairs[rank] for rank in mesh.processes.ranks],
        imbalance=max(pairs) * len(pairs) / sum(pairs),
        bytes_sent=[int(row[1]) for row in ranks],
        watched_seconds=max(row[2] for row in ranks),
        logits=logits,
    )


def _timed(engine: Engine, prompt: list[int]) -> tuple[float, torch.Tensor]:
    """Seconds of a prefill and its logits on the CPU, when all device work is done."""
    begin = time.perf_counter()
    logits = prefill(engine, prompt)
    return time.perf_counter() - begin, logits
