"""Goals of the serving benchmark as they are typed, and its results as a table."""

from __future__ import annotations

import math

from dsa_engine.commands.bench.serving_benchmark import GOALS, METRICS, ServingResult
from dsa_engine.measure.report import format_table


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


def print_serving(result: ServingResult) -> None:
    """Prints the load and its results, then a row for each latency."""
    json = result.to_json()
    rate = result.load.request_rate
    asked = "all at once" if math.isinf(rate) else f"{rate:g} requests/s asked for"
    rows: list[tuple[object, ...]] = [
        ("completed requests", json["completed"]),
        ("failed requests", json["failed"]),
        ("most requests at once", json["max_concurrent_requests"]),
        ("duration, s", json["duration"]),
        ("input tokens", f"{json['total_input_tokens']:,}"),
        ("output tokens", f"{json['total_output_tokens']:,}"),
        (f"requests/s ({asked})", json["request_throughput"]),
        ("output tokens/s", json["output_throughput"]),
        ("output tokens/s per device", json["output_throughput_per_device"]),
        ("input and output tokens/s", json["total_token_throughput"]),
    ]
    if json["request_goodput"] is not None:
        rows.append(("goodput: requests/s that kept the goals", json["request_goodput"]))
    print("\n" + format_table(("", "value"), rows))
    which = ("mean", "median", "p90", "p99")
    times = [
        (name.upper(), *(json[f"{part}_{name}_ms"] for part in which)) for name in METRICS if f"mean_{name}_ms" in json
    ]
    print("\n" + format_table(("", *(f"{part} ms" for part in which)), times))
    for error in sorted({r["error"] for r in result.requests if r["error"] is not None}):
        print(f"failed: {error}")
