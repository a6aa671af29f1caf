"""Requests of one length, generated together: time to first token and time per output token, measured."""

from __future__ import annotations

from dsa_engine.commands.bench.result import Result
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.speculation.acceptance import count_equal
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import barrier, from_all_ranks
from dsa_engine.measure.assumed_acceptance import AssumedAcceptance
from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.requests import check_batch
from dsa_engine.measure.timed_generation import (
    TimedGeneration,
    generate_batch,
    max_output_tokens,
    measured_prompts,
)
from dsa_engine.outputs import SpeculationMetrics


def check_lengths(input_len: int, output_len: int, max_model_len: int) -> None:
    """Raises ``ValueError`` if requests of these numbers of tokens are too long."""
    if input_len + output_len > max_model_len:
        what = f"{input_len} tokens and up to {output_len} new ones exceed max_model_len {max_model_len}"
        raise ValueError(f"{what}; measure shorter inputs or outputs, or raise max_model_len")


def check_latency(engine: Engine, input_len: int, output_len: int, batch_size: int, fill_cache: bool) -> None:
    """Raises the errors that :func:`measure_latency` would raise for this length and batch; runs nothing."""
    max_tokens = max_output_tokens(engine, input_len, output_len, batch_size, fill_cache)
    check_lengths(input_len, max_tokens, engine.max_model_len)
    check_batch(engine.scheduler.capacity, batch_size, input_len, max_tokens, fill_cache)
    if batch_size > (limit := engine.options.max_num_seqs):
        raise ValueError(f"the batch size {batch_size} exceeds max_num_seqs {limit}; raise max_num_seqs")


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
) -> Result:
    """Generates ``output_len`` tokens for ``batch_size`` random prompts, ``warmup + repeat`` times, and once more.

    With ``fill_cache`` no prompt is computed: caches are filled with random rows, and only decode is measured.
    The last generation is not timed as a whole: it gives the times of the stages, and recording them takes time in
    small steps. A step makes ``num_drafts`` drafts (default: ``num_speculative_tokens``); ``acceptance`` decides how
    many are accepted, or the model if it is None.
    """
    engine, mesh = llm.engine, llm.engine.mesh
    timed: list[TimedGeneration] = []
    if num_drafts is not None:
        engine.set_num_drafts(num_drafts)
    if engine.runner.drafter is not None:
        engine.runner.drafter.rule = acceptance or count_equal
    reset_peak(mesh.device)
    peak = 0.0
    for i in range(warmup + repeat + 1):
        prompts = measured_prompts(engine, input_len, batch_size, seed + i * batch_size, fill_cache)
        barrier(engine)
        watch = i == warmup + repeat
        peak = float(peak_bytes(mesh.device)) if watch else peak
        generation = generate_batch(engine, prompts, output_len, watch=watch, fill_cache=fill_cache)
        if i >= warmup:
            timed.append(generation)
    watched = timed.pop()
    peaks = from_all_ranks(engine, [peak])
    stages = {} if fill_cache else {"prefill": _stages(watched, range(max(watched.first_token_steps) + 1))}
    if watched.decode_steps:
        stages["decode"] = _stages(watched, watched.decode_steps, per=watched.decoded_tokens)
    decoded = timed if watched.decode_steps else []  # otherwise the whole batch never decoded together
    drafted = [step for one in timed for request in one.requests for step in request.draft_stats]
    return Result(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        ranks=mesh.world_size,
        ttft=[s for one in timed for s in one.ttft],
        prefill=[max(one.ttft) for one in timed if one.ttft],
        tpot=[one.tpot for one in decoded],
        beyond_median=[one.beyond_median for one in decoded],
        itl=[s for one in decoded for s in one.itl],
        peak_memory_bytes=[int(row[0]) for row in peaks],
        stages=stages,
        num_speculative_tokens=engine.runner.num_drafts,
        speculation=SpeculationMetrics.of(drafted) if engine.runner.num_drafts else None,
        assumed_acceptance=acceptance if engine.runner.num_drafts else None,
    )


def _stages(watched: TimedGeneration, steps: range, per: float = 1.0) -> list[dict[str, float]]:
    """Seconds in each stage of these steps for ``per`` tokens, a dictionary per rank. The timed generations take the
    same steps as the watched one."""
    each = [watched.timers[step].seconds() for step in steps]
    seconds = {name: sum(step[name] for step in each) / per for name in each[0]}
    ranks = from_all_ranks(watched.engine, [*seconds.values()])
    return [dict(zip(seconds, row, strict=True)) for row in ranks]
