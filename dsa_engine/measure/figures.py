"""What a measured time is reported as: percentiles, shares of the stages, what an emulated rank adds, other depths.

A figure is measured or it is marked: what is modelled (communication of an emulated rank) or scaled (to the layers that
were not there) stands under keys of its own and never in those of a measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_engine.measure.emulation.overlap_model import Communication
from dsa_engine.model.config import ModelConfig

# The stages that a decoder layer of each kind goes through; all others are outside the layers.
_EVERY_LAYER = ("MLA prolog", "sparse flash attention", "MLA epilog", "communication")
_SELECTING_LAYER = ("indexer prolog", "lightning indexer")
_DENSE_LAYER = ("dense MLP",)
_MOE_LAYER = ("MoE gate", "MoE dispatch", "MoE experts", "MoE shared", "MoE combine")


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile, least and most, in milliseconds, named as ``vllm bench`` names them."""
    ms = sorted(s * 1e3 for s in seconds)

    def at(share: float) -> float:  # between two samples in proportion, as numpy does
        place = share * (len(ms) - 1)
        below = int(place)
        return ms[below] + (place - below) * (ms[min(below + 1, len(ms) - 1)] - ms[below])

    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"p90_{name}_ms": at(0.9),
        f"p99_{name}_ms": at(0.99),
        f"min_{name}_ms": ms[0],
        f"max_{name}_ms": ms[-1],
    }


@dataclass(frozen=True)
class Figure:
    """A time such as TTFT or TPOT.

    Attributes:
        name: "ttft", "tpot", "itl".
        seconds: the samples; of an emulated rank, its computation alone.
        tokens: that all ranks together process in this time, for the rate.
        ranks: of the run, emulated or not.
        communication: modelled, of an emulated rank; None where nothing is emulated.
    """

    name: str
    seconds: list[float]
    tokens: int
    ranks: int
    communication: Communication | None = None

    @property
    def median(self) -> float:
        """Seconds; of an emulated rank, measured computation."""
        return statistics.median(self.seconds)

    @property
    def not_overlapped(self) -> float:
        """Median seconds with all communication added."""
        return self.median + (self.communication.seconds if self.communication else 0.0)

    @property
    def overlapped(self) -> float:
        """Median seconds with the communication added that does not hide (:func:`~.emulation.overlap_model.replay`)."""
        return self.median + (self.communication.stalled_seconds if self.communication else 0.0)

    def to_json(self, rate: str | None = None) -> dict[str, Any]:
        """The figure's keys; with ``rate``, such as "input_throughput", tokens/s too, in all and for each device.

        Of an emulated rank the percentiles are called "computed_…", and ``"<name>_ms"`` holds what is modelled.
        """
        if self.communication is None:
            result: dict[str, Any] = dict(percentiles(self.name, self.seconds))
            rates = {"": self.median}
        else:
            result = dict(percentiles(f"computed_{self.name}", self.seconds))
            result[f"{self.name}_ms"] = {
                "computed": self.median * 1e3,
                "communication": self.communication.seconds * 1e3,
                "not_overlapped": self.not_overlapped * 1e3,
                "overlapped": self.overlapped * 1e3,
                "communication_by_stage": {name: s * 1e3 for name, s in self.communication.total.items()},
            }
            rates = {"_not_overlapped": self.not_overlapped, "_overlapped": self.overlapped}
        if rate:
            for suffix, seconds in rates.items():
                result[rate + suffix] = self.tokens / seconds
                result[f"{rate}_per_device{suffix}"] = self.tokens / seconds / self.ranks
        return result

    def scaled(self, stages: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
        """Milliseconds at another depth: the median, divided by the shares of ``stages``, each times its factor.

        Args:
            stages: seconds in each stage, of the same work.
            factors: of :func:`depth_factors`; what is not there counts once.
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


def depth_factors(measured: ModelConfig, full: ModelConfig) -> dict[str, float]:
    """How many times as many layers of each kind ``full`` has, for every stage of a layer.

    Raises:
        ValueError: a kind of layer that ``full`` has was not measured.
    """
    factors: dict[str, float] = {}
    for stages, what, count in (
        (_EVERY_LAYER, "decoder layer", lambda c: c.num_hidden_layers),
        (_SELECTING_LAYER, "layer with an indexer", lambda c: c.indexer_types.count("full")),
        (_DENSE_LAYER, "dense layer", lambda c: c.mlp_layer_types.count("dense")),
        (_MOE_LAYER, "MoE layer", lambda c: c.mlp_layer_types.count("sparse")),
    ):
        here, there = count(measured), count(full)
        if there and not here:
            raise ValueError(f"no {what} was measured and the whole model has {there}; measure more layers")
        factors |= dict.fromkeys(stages, there / here if here else 1.0)
    return factors


def mean_stages(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Seconds in each stage, averaged over the ranks."""
    return {name: statistics.fmean(rank[name] for rank in ranks) for name in ranks[0]}
