"""A measured latency, what an emulated rank's communication adds to it, and its value at another depth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_engine.measure.emulation.overlap_model import Communication
from dsa_engine.measure.report import percentiles


@dataclass(frozen=True)
class Latency:
    """A time such as TTFT or TPOT, measured several times.

    Measured times and modelled ones (the communication of an emulated rank) have separate keys in every result.

    Attributes:
        name: "ttft", "tpot", "itl".
        seconds: the samples; for an emulated rank, its computation alone.
        tokens: number that all ranks together process in this time, for the rate.
        ranks: number of ranks of the run, emulated or not.
        communication: modelled, for an emulated rank; None if nothing is emulated.
        stand_ins: seconds, measured separately, of the work done in place of the other ranks; ``seconds`` exclude them.
    """

    name: str
    seconds: list[float]
    tokens: int
    ranks: int
    communication: Communication | None = None
    stand_ins: float = 0.0

    @property
    def median(self) -> float:
        """Seconds; for an emulated rank, its measured computation."""
        return statistics.median(self.seconds)

    @property
    def not_overlapped(self) -> float:
        """Median seconds with all communication added."""
        return self.median + (self.communication.seconds if self.communication else 0.0)

    @property
    def overlapped(self) -> float:
        """Median seconds with the communication added that no work overlaps
        (:func:`~.emulation.overlap_model.replay`)."""
        return self.median + (self.communication.stalled_seconds if self.communication else 0.0)

    def to_json(self, rate: str | None = None) -> dict[str, Any]:
        """The latency as JSON; with ``rate``, such as "input_throughput", also tokens/s, in total and per device.

        "<name>_samples_ms" are the single measurements. For an emulated rank the percentiles and samples are called
        "computed_…", and "<name>_ms" holds the modelled times.
        """
        if self.communication is None:
            result = self._measured(self.name)
            rates = {"": self.median}
        else:
            result = self._measured(f"computed_{self.name}")
            result[f"{self.name}_ms"] = {
                "computed": self.median * 1e3,
                "modelled_communication": self.communication.seconds * 1e3,
                "not_overlapped": self.not_overlapped * 1e3,
                "overlapped": self.overlapped * 1e3,
                "stand_ins_taken_off": self.stand_ins * 1e3,
                "modelled_communication_by_stage": {name: s * 1e3 for name, s in self.communication.total.items()},
            }
            rates = {"_not_overlapped": self.not_overlapped, "_overlapped": self.overlapped}
        if rate:
            for suffix, seconds in rates.items():
                result[rate + suffix] = self.tokens / seconds
                result[f"{rate}_per_device{suffix}"] = self.tokens / seconds / self.ranks
        return result

    def _measured(self, name: str) -> dict[str, Any]:
        return {**percentiles(name, self.seconds), f"{name}_samples_ms": [round(s * 1e3, 4) for s in self.seconds]}

    def scaled(self, stages: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
        """Milliseconds at another depth: each stage's part of the median times the stage's factor.

        Args:
            stages: seconds in each stage, of the same work; only their proportions count.
            factors: see :func:`~dsa_engine.commands.bench.full_depth.depth_factors`; a stage without one counts once.
        """
        growth = sum(s * factors.get(name, 1.0) for name, s in stages.items()) / sum(stages.values())
        computed = self.median * growth
        if self.communication is None:
            return {f"{self.name}_ms": computed * 1e3}
        total = sum(s * factors.get(name, 1.0) for name, s in self.communication.total.items())
        stalls = sum(s * factors.get(name, 1.0) for name, s in self.communication.stalls.items())
        return {
            f"{self.name}_ms_computed": computed * 1e3,
            f"{self.name}_ms_not_overlapped": (computed + total) * 1e3,
            f"{self.name}_ms_overlapped": (computed + stalls) * 1e3,
        }
