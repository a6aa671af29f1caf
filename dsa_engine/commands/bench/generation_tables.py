"""Tables of measured latencies."""

from __future__ import annotations

from typing import Any

from dsa_engine.commands.bench.generation_benchmark import LatencyResult
from dsa_engine.measure.report import format_percentages, format_table
from dsa_engine.measure.stage_timer import mean_stages
from dsa_engine.system.sizes import format_bytes


def size_of(result: LatencyResult) -> str:
    """Length, batch size and, if there are any, drafts as text."""
    drafts = result.num_speculative_tokens
    return f"{result.input_len:,} × {result.batch_size}" + (f", k = {drafts}" if drafts else "")


def print_latencies(metric: str, results: list[LatencyResult], above: str) -> None:
    """Prints a table of ``metric`` ("ttft" or "tpot"), a row per length and batch size, then a table of the stages.

    Args:
        above: the heading of an emulated run; "" if nothing is emulated.
    """
    if above:
        print(above + "\n")
    rows = [_row(metric, result) for result in results]
    print(format_table(("input", "batch", "drafts", "output", *_columns(metric), "peak memory"), rows))
    _print_speculation(results)
    for phase in ("prefill", "decode"):
        ranks = [(r, r.prefill_stages if phase == "prefill" else r.decode_stages) for r in results]
        columns = {size_of(r): mean_stages(stages) for r, stages in ranks if stages}
        if columns:
            print("\n" + format_percentages(f"{phase} stage", columns))
    print()


def _columns(metric: str) -> list[str]:
    unit = "input tokens/s" if metric == "ttft" else "output tokens/s"
    return [*(f"{which} {metric.upper()} ms" for which in ("median", "p90", "p99")), unit, "per device"]


def _row(metric: str, result: LatencyResult) -> tuple[Any, ...]:
    size = (f"{result.input_len:,}", result.batch_size, result.num_speculative_tokens, result.output_len)
    if (result.ttft if metric == "ttft" else result.tpot) is None:
        return (*size, *["-"] * 6)  # the cache had no room for the whole batch to decode at once
    json, peak = result.to_json(), format_bytes(max(result.peak_memory_bytes))
    rate = "input_throughput" if metric == "ttft" else "output_throughput"
    times = [json[f"{which}_{metric}_ms"] for which in ("median", "p90", "p99")]
    return (*size, *times, json[rate], json[f"{rate}_per_device"], peak)


def _print_speculation(results: list[LatencyResult]) -> None:
    """Prints how many drafts were accepted; nothing if there were none."""
    rows = []
    for result in results:
        counts, assumed = result.speculation, result.assumed_acceptance
        if counts is not None and counts.num_drafts:
            rates = " ".join(f"{rate:.0%}" for rate in counts.acceptance_rates)
            by = "assumed" if assumed else "the model"
            rows.append((size_of(result), f"{counts.mean_acceptance_length:.2f}", rates, by))
    if rows:
        print("\n" + format_table(("drafts", "tokens a step", "accepted by position", "decided by"), rows))
