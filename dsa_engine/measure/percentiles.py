"""Percentiles of measured times."""

from __future__ import annotations

import statistics


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile, minimum and maximum, in milliseconds, named as ``vllm bench`` names
    them."""
    ms = sorted(s * 1e3 for s in seconds)

    def at(fraction: float) -> float:  # between two samples in proportion, as numpy does
        rank = fraction * (len(ms) - 1)
        below = int(rank)
        return ms[below] + (rank - below) * (ms[min(below + 1, len(ms) - 1)] - ms[below])

    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"p90_{name}_ms": at(0.9),
        f"p99_{name}_ms": at(0.99),
        f"min_{name}_ms": ms[0],
        f"max_{name}_ms": ms[-1],
    }
