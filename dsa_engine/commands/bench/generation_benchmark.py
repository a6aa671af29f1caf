"""Requests of one length, generated together: time to first token and time per output token, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.speculation.acceptance import count_equal
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import barrier, from_all_ranks, stages_of_all_ranks
from dsa_engine.measure.assumed_acceptance import AssumedAcceptance
from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.filled_requests import check_batch
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.reported_latency import Latency
from dsa_engine.measure.stage_timer import milliseconds
from dsa_engine.measure.timed_generation import TimedGeneration, generate_batch, max_output_tokens
from dsa_engine.outputs import SpeculationMetrics


@dataclass(frozen=True)
class LatencyResult:
    """Result for requests of one length, generated together. Times are seconds.

    Stages have one dictionary per rank. They are measured in one more generation, which is not timed.
    """

    input_len: int
    output_len: int
    batch_size: int
    ttft: Latency | None  # a sample per request and repeat; None if caches were filled
    prefill: Latency | None  # a sample per repeat: until the last request has its first token
    tpot: Latency | None  # a sample per repeat: time per token after the first, while the whole batch decodes
    itl: Latency | None  # a sample per such step
    peak_memory_bytes: list[int]  # per rank
    prefill_stages: list[dict[str, float]]  # until every request has its first token
    decode_stages: list[dict[str, float]]  # per token after that; empty without one
    num_speculative_tokens: int = 0
    speculation: SpeculationMetrics | None = None  # sum of all timed generations; None without drafts
    assumed_acceptance: AssumedAcceptance | None = None  # None: the model decided

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "batch_size": self.batch_size,
        }
        if self.ttft and self.prefill:
            result |= self.ttft.to_json() | self.prefill.to_json("input_throughput")
        else:
            result["cache"] = "filled with random rows"
        if self.tpot and self.itl:
            result |= self.tpot.to_json("output_throughput") | self.itl.to_json()
        if self.speculation:
            result |= self._speculation_json(self.speculation)
        stages = {"prefill": self.prefill_stages, "decode": self.decode_stages}
        stage_ms = {phase: [milliseconds(rank) for rank in ranks] for phase, ranks in stages.items() if ranks}
        return result | {"peak_memory_bytes": self.peak_memory_bytes, "stage_ms": stage_ms}

    def _speculation_json(self, counts: SpeculationMetrics) -> dict[str, Any]:
        result = {
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_drafts": counts.num_drafts,
            "num_draft_tokens": counts.num_draft_tokens,
            "num_accepted_tokens": counts.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(counts.num_accepted_tokens_per_pos),
            "acceptance_rates": counts.acceptance_rates,
            "mean_acceptance_length": counts.mean_acceptance_length,
        }
        return result | ({"assumed_acceptance": list(self.assumed_acceptance.rates)} if self.assumed_acceptance else {})


def check_latency(engine: Engine, input_len: int, output_len: int, batch_size: int, fill_cache: bool) -> None:
    """Raises the errors that :func:`measure_latency` would raise for this length and batch; runs nothing.

    Raises:
        ValueError, CapacityError: the length, or the whole batch at once, is not possible.
    """
    max_tokens = max_output_tokens(engine, input_len, output_len, batch_size, fill_cache)
    if input_len + max_tokens > engine.max_model_len:
        raise ValueError(
            f"{input_len} tokens and up to {max_tokens} new ones exceed max_model_len {engine.max_model_len}; measure "
            "shorter inputs or outputs, or raise max_model_len"
        )
    check_batch(engine.scheduler.capacity, batch_size, input_len, max_tokens, fill_cache)
    if batch_size > engine.options.max_num_seqs:
        raise ValueError(
            f"the batch size {batch_size} exceeds max_num_seqs {engine.options.max_num_seqs}; raise max_num_seqs"
        )


def measure_latency(
    llm: LLM,
    input_len: int,
    output_len: int,
    *,
    batch_size: int = 1,
    warmup: int = 1,
    repeat: int = 3,
    seed: int = 0,
    fill_cache: bool = False,
    num_drafts: int | None = None,
    acceptance: AssumedAcceptance | None = None,
) -> LatencyResult:
    """Generates ``output_len`` tokens for ``batch_size`` random prompts, ``warmup + repeat`` times, and once more.

    With ``fill_cache`` no prompt is computed: caches are filled with random rows, and only decode is measured.
    The last generation is not timed as a whole: it gives the times of the stages, and recording them takes time in
    small steps. A step makes ``num_drafts`` drafts (default: ``num_speculative_tokens``); ``acceptance`` decides how
    many are accepted, or the model if it is None.
    """
    engine, mesh = llm.engine, llm.engine.mesh
    timed: list[TimedGeneration] = []
    if num_drafts is not None:
        engine.draft(num_drafts)
    if engine.runner.drafter is not None:
        engine.runner.drafter.rule = acceptance or count_equal
    reset_peak(mesh.device)
    peak = 0.0
    for i in range(warmup + repeat + 1):
        prompts = [random_prompt(engine, input_len, seed + i * batch_size + b) for b in range(batch_size)]
        barrier(engine)
        watch = i == warmup + repeat
        peak = float(peak_bytes(mesh.device)) if watch else peak
        generation = generate_batch(engine, prompts, output_len, watch=watch, fill_cache=fill_cache)
        if i >= warmup:
            timed.append(generation)
    watched = _WatchedGeneration(timed.pop(), engine)
    peaks = from_all_ranks(engine, [peak])
    ttft, prefill, prefill_stages = (None, None, []) if fill_cache else _prefill(watched, timed, input_len)
    tpot, itl, decode_stages = _decode(watched, timed)
    return LatencyResult(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        ttft=ttft,
        prefill=prefill,
        tpot=tpot,
        itl=itl,
        peak_memory_bytes=[int(row[0]) for row in peaks],
        prefill_stages=prefill_stages,
        decode_stages=decode_stages,
        num_speculative_tokens=engine.runner.num_drafts,
        speculation=_speculation(timed) if engine.runner.num_drafts else None,
        assumed_acceptance=acceptance if engine.runner.num_drafts else None,
    )


def _speculation(timed: list[TimedGeneration]) -> SpeculationMetrics:
    return SpeculationMetrics.of([step for one in timed for request in one.requests for step in request.draft_stats])


class _WatchedGeneration:
    """A generation whose steps were watched. The timed ones take the same steps, so it tells what they consist of."""

    def __init__(self, generation: TimedGeneration, engine: Engine):
        self.engine = engine
        self.batch_size = len(generation.requests)
        self.first_token_steps = generation.first_token_steps
        self.decode_steps = generation.decode_steps
        self.decoded_tokens = generation.decoded_tokens
        self._stages = [timer.seconds() for timer in generation.timers]

    def stages(self, steps: slice, per: float = 1.0) -> list[dict[str, float]]:
        """Seconds in each stage for ``per`` tokens, a dictionary per rank."""
        seconds = {name: sum(step[name] for step in self._stages[steps]) / per for name in self._stages[0]}
        return stages_of_all_ranks(self.engine, seconds)

    def latency(self, name: str, seconds: list[float], tokens: int) -> Latency:
        return Latency(name, seconds, tokens, self.engine.mesh.world_size)


def _prefill(
    watched: _WatchedGeneration, timed: list[TimedGeneration], input_len: int
) -> tuple[Latency, Latency, list[dict[str, float]]]:
    """TTFT, the time until every request has its first token, and the stages of that time."""
    ttft = watched.latency("ttft", [s for generation in timed for s in generation.ttft], input_len)
    slowest = [max(generation.ttft) for generation in timed]
    prefill = watched.latency("prefill", slowest, input_len * watched.batch_size)
    return ttft, prefill, watched.stages(slice(0, max(watched.first_token_steps) + 1))


def _decode(
    watched: _WatchedGeneration, timed: list[TimedGeneration]
) -> tuple[Latency | None, Latency | None, list[dict[str, float]]]:
    """TPOT, ITL, and the stages of one token; nothing if the whole batch never decoded together."""
    if not watched.decode_steps:
        return None, None, []
    steps = slice(watched.decode_steps.start, watched.decode_steps.stop)
    per_token = [sum(generation.itl) / generation.decoded_tokens for generation in timed]
    every_step = [s for generation in timed for s in generation.itl]
    size, tokens = watched.batch_size, watched.decoded_tokens
    tpot = watched.latency("tpot", per_token, size)
    itl = watched.latency("itl", every_step, size)
    return tpot, itl, watched.stages(steps, per=tokens)
