"""Goals of the serving benchmark as they are typed, and its results as tables."""

from __future__ import annotations

import math
from typing import Any

from dsa_engine.commands.bench.serving.result import GOALS, METRICS, ServingResult, compared
from dsa_engine.measure.report import format_table

_PARTS = ("mean", "median", "p90", "p99")


def read_goals(texts: list[str]) -> dict[str, float]:
    """``["ttft:2000", "tpot:50"]``, in milliseconds, as seconds by name; ``ValueError`` says what is allowed."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOALS or not 0 < limit < math.inf:
            names = ", ".join(GOALS)
            raise ValueError(f"a goal is a name of {names} and milliseconds above 0, such as tpot:50, not {text!r}")
        goals[name] = limit / 1e3
    return goals


def print_serving(result: ServingResult, without: ServingResult | None = None) -> None:
    """Prints the load and its results, then a row for each latency, then errors and how often each came.

    Args:
        without: the same traffic without hits of the prefix cache, shown beside it.
    """
    json = compared(result, without)
    other = json.get("without_hits")
    columns = [_figures(result, json)] + ([_figures(without, other)] if without and other else [])
    rows = [(name, *(figures[name] for figures in columns)) for name in columns[0]]
    print("\n" + format_table(("", "value", "without hits")[: len(columns) + 1], rows))
    if times := _latencies(result, json, other):
        print("\n" + format_table(("", *(f"{part} ms" for part in _PARTS)), times))
    if json.get("median_ttft_hit_ratio"):
        print(f"\nTTFT without the hit / with it, median over these requests: {json['median_ttft_hit_ratio']:.3g}")
    for one, label in ((result, ""), (without, " without hits")):
        errors = [r["error"] for r in one.requests if r["error"] is not None] if one else []
        for error in sorted(set(errors)):
            print(f"failed{label}: {errors.count(error)} × {error}")


def _figures(result: ServingResult, json: dict[str, Any]) -> dict[str, object]:
    """A column of the first table: counts and rates by name."""
    rate = result.load.request_rate
    asked = "all at once" if math.isinf(rate) else f"{rate:g} requests/s asked for"
    hits = json["prefix_cache_hit_rate"]
    figures: dict[str, object] = {
        "completed requests": json["completed"],
        "failed requests": json["failed"],
        "most requests at once": json["max_concurrent_requests"],
        "duration, s": json["duration"],
        "input tokens": f"{json['total_input_tokens']:,}",
        "of them in the prefix cache": "not reported" if hits is None else f"{json['total_cached_tokens']:,}",
        "prefix cache hit rate": "not reported" if hits is None else f"{hits:.1%}",
        "output tokens": f"{json['total_output_tokens']:,}",
        f"requests/s ({asked})": json["request_throughput"],
        "output tokens/s": json["output_throughput"],
    }
    if json["output_throughput_per_device"] is not None:
        figures["output tokens/s per device"] = json["output_throughput_per_device"]
    figures["input and output tokens/s"] = json["total_token_throughput"]
    if json["request_goodput"] is not None:
        figures["goodput: requests/s that kept the goals"] = json["request_goodput"]
    return figures


def _latencies(result: ServingResult, json: dict[str, Any], other: dict[str, Any] | None) -> list[tuple[object, ...]]:
    """A row for each latency, those without hits below; the time to the first token also by hit and miss."""
    hits, misses = len(result.hits()), len(result.hits(False))
    names = {name: name.upper() for name in METRICS}
    if hits:
        more = {"ttft_hit": f"TTFT of {hits} hits", "ttft_miss": f"TTFT of {misses} misses"}
        names = {"ttft": "TTFT", **more, **names}
    rows: list[tuple[object, ...]] = []
    for name, title in names.items():
        beside = None if name == "ttft_miss" else other  # there all are misses
        for label, one in ((title, json), (f"{title.replace(f'{hits} hits', 'these')}, without hits", beside)):
            if one and f"mean_{name}_ms" in one:
                rows.append((label, *(one[f"{part}_{name}_ms"] for part in _PARTS)))
    return rows
