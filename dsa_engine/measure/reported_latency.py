"""A measured latency, and its value at another depth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_engine.measure.report import percentiles


@dataclass(frozen=True)
class Latency:
    """A time such as TTFT or TPOT, measured several times.

    Attributes:
        name: "ttft", "tpot", "itl".
        seconds: the samples.
        tokens: number that all ranks together process in this time, for the rate.
        ranks: number of ranks of the run, emulated or not.
    """

    name: str
    seconds: list[float]
    tokens: int
    ranks: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def to_json(self, rate: str | None = None) -> dict[str, Any]:
        """The latency as JSON; with ``rate``, such as "input_throughput", also tokens/s, in total and per device."""
        samples = [round(s * 1e3, 4) for s in self.seconds]
        result = {**percentiles(self.name, self.seconds), f"{self.name}_samples_ms": samples}
        if rate:
            result |= {rate: self.tokens / self.median, f"{rate}_per_device": self.tokens / self.median / self.ranks}
        return result

    def scaled(self, stages: Mapping[str, float], factors: Mapping[str, float]) -> float:
        """Milliseconds at another depth: each stage's part of the median times the stage's factor.

        Args:
            stages: seconds in each stage, of the same work; only their proportions count.
            factors: see :func:`~dsa_engine.commands.bench.full_depth.depth_factors`; a stage without one counts once.
        """
        growth = sum(s * factors.get(name, 1.0) for name, s in stages.items()) / sum(stages.values())
        return self.median * growth * 1e3
