"""The result of a serving benchmark: the goals, the figures of all requests together, and their tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dsa_engine.measure.report import format_table, percentiles

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")  # those with one value per request
NOT_SENT = "not sent: an earlier request of its conversation failed"
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


def summary(
    requests: Sequence[Mapping[str, Any]], duration: float, max_at_once: int, goals: Mapping[str, float]
) -> dict[str, Any]:
    """The result with the keys of ``vllm bench serve``, and the figures of every request under "requests".

    Further keys: "prefix_cache_hit_rate", the fraction of all input tokens that the prefix cache had (None: not
    known), and the times to the first token of requests with hits ("…_ttft_hit_ms") and without.

    Args:
        requests: see :class:`.traffic.Traffic`; times in seconds.
        duration: seconds.
        goals: maximum seconds of "ttft", "tpot" and "e2el" for a request to count as good.
    """
    done = [r for r in requests if r["error"] is None]
    tokens_in, tokens_out = (sum(r[key] for r in done) for key in ("input_len", "output_len"))
    cached = [r["num_cached_tokens"] for r in done]
    known = bool(done) and None not in cached
    good = [r for r in done if all(r[name] is None or r[name] <= limit for name, limit in goals.items())]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(cached) if known else None,
        "prefix_cache_hit_rate": sum(cached) / tokens_in if known else None,
        "request_throughput": len(done) / duration,
        "request_goodput": len(good) / duration if goals else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_concurrent_requests": max_at_once,
    }
    times = {name: [r[name] for r in done if r[name] is not None] for name in GOALS}
    times["itl"] = [gap for r in done for gap in r["itl"]]
    if any(cached):
        times["ttft_hit"] = [r["ttft"] for r in done if r["num_cached_tokens"]]
        times["ttft_miss"] = [r["ttft"] for r in done if not r["num_cached_tokens"]]
    for name, seconds in times.items():
        if seconds:
            result |= percentiles(name, seconds)
    return result | {"requests": list(requests)}


def print_serving(result: Mapping[str, Any], request_rate: float) -> None:
    """Prints a result of :func:`summary`, then a row for each latency, then errors and how often each came."""
    asked = "all at once" if math.isinf(request_rate) else f"{request_rate:g} requests/s asked for"
    hits = result["prefix_cache_hit_rate"]
    rows: list[tuple[str, object]] = [
        ("completed requests", result["completed"]),
        ("failed requests", result["failed"]),
        ("maximum of requests at once", result["max_concurrent_requests"]),
        ("duration, s", result["duration"]),
        ("input tokens", f"{result['total_input_tokens']:,}"),
        ("of them in the prefix cache", "not reported" if hits is None else f"{result['total_cached_tokens']:,}"),
        ("prefix cache hit rate", "not reported" if hits is None else f"{hits:.1%}"),
        ("output tokens", f"{result['total_output_tokens']:,}"),
        (f"requests/s ({asked})", result["request_throughput"]),
        ("output tokens/s", result["output_throughput"]),
        ("input and output tokens/s", result["total_token_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("goodput: requests/s that kept the goals", result["request_goodput"]))
    print("\n" + format_table(("", "value"), rows))
    names = {"ttft": "TTFT", "ttft_hit": "TTFT of hits", "ttft_miss": "TTFT of misses"}
    names |= {name: name.upper() for name in METRICS}
    times = [
        (title, *(result[f"{part}_{name}_ms"] for part in _PARTS))
        for name, title in names.items()
        if f"mean_{name}_ms" in result
    ]
    if times:
        print("\n" + format_table(("", *(f"{part} ms" for part in _PARTS)), times))
    errors = [r["error"] for r in result["requests"] if r["error"] is not None]
    for error in sorted(set(errors)):
        print(f"failed: {errors.count(error)} × {error}")
