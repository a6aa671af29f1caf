"""The demand on a deployment, and a plan that meets it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsa_engine.commands.planner.choices import DRAFTS
from dsa_engine.commands.planner.prediction.deployment import Deployment
from dsa_engine.commands.planner.prediction.predicted import DecodeStep, Prefill
from dsa_engine.measure.assumed_acceptance import AssumedAcceptance
from dsa_engine.measure.costs.handover import Handover

NEAR = 0.1  # part of the highest rate that a plan may lack if its latency is lower
ASSUMED_ACCEPTANCE = AssumedAcceptance.default(max(DRAFTS)).rates


@dataclass(frozen=True)
class Demand:
    """The demand on a deployment.

    Attributes:
        devices: number of devices.
        input_len, output_len: tokens of a request.
        ttft, tpot: maximum seconds; None: any.
        requests: number of requests at once; None: the best number.
        acceptance: by draft position, the fraction of steps in which at least so many drafts are accepted.
    """

    devices: int
    input_len: int
    output_len: int = 1024
    ttft: float | None = None
    tpot: float | None = None
    requests: int | None = None
    acceptance: tuple[float, ...] = ASSUMED_ACCEPTANCE

    def __post_init__(self) -> None:
        for name in ("devices", "input_len", "output_len", "ttft", "tpot", "requests"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
        AssumedAcceptance(self.acceptance)

    def tokens_per_step(self, drafts: int) -> float:
        return 1 + sum(self.acceptance[min(i, len(self.acceptance) - 1)] for i in range(drafts))

    @property
    def context(self) -> int:
        """Tokens that a decoding request sees on average."""
        return self.input_len + self.output_len // 2

    @property
    def longest(self) -> int:
        return self.input_len + self.output_len


@dataclass(frozen=True)
class DeploymentPlan:
    """A way to use the devices.

    Attributes:
        split: whether prefill and decode have separate devices, as with ``ParallelConfig.prefill_ranks``.
        prefill, decode: one instance of each; without ``split`` both are the same ranks.
        prefill_instances, decode_instances: number of each; equal without ``split``.
        tpot: seconds per token, including prefills of other requests between decode steps.
        tokens_per_s: output tokens of all devices together.
        limit: the bound of the rate: "prefill", "decode" or "handover".
        latency: seconds of one request, from its prompt to its last token, without queueing.
        highest_rate: the plan with the highest rate, if this one was chosen for its lower latency; else None.
        handover: the way of a prompt's cache rows to the devices that decode; None without ``split``.
    """

    split: bool
    prefill: Prefill
    decode: DecodeStep
    prefill_instances: int
    decode_instances: int
    tpot: float
    tokens_per_s: float
    limit: str
    latency: float
    highest_rate: DeploymentPlan | None = None
    handover: Handover | None = None

    @property
    def ttft(self) -> float:
        return self.prefill.ttft

    @property
    def requests(self) -> int:
        return self.decode.requests * self.decode_instances

    @property
    def devices(self) -> int:
        used = self.decode_instances * self.decode.how.ranks
        return used + self.prefill_instances * self.prefill.how.ranks * self.split

    @property
    def replicas(self) -> int:
        """Number of redundant experts per layer that fit on a rank beside its caches."""
        return int(max(0.0, self.decode.room) // self.decode.expert_bytes)

    def misses(self, demand: Demand) -> float:
        """The largest relative excess over the demand; 0 if it is met."""
        over = [0.0]
        if demand.ttft is not None:
            over.append(self.ttft / demand.ttft - 1)
        if demand.tpot is not None:
            over.append(self.tpot / demand.tpot - 1)
        if demand.requests is not None:
            over.append(demand.requests / self.requests - 1)
        return max(over)

    def summary(self) -> dict[str, Any]:
        """Its figures for the demand."""
        return {
            "ttft_ms": self.ttft * 1e3,
            "tpot_ms": self.tpot * 1e3,
            "concurrent_requests": self.requests,
            "output_tokens_per_s": self.tokens_per_s,
            "output_tokens_per_s_per_device": self.tokens_per_s / self.devices,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "devices_used": self.devices,
            "prefill_instances": self.prefill_instances,
            "decode_instances": self.decode_instances,
            **self.summary(),
            "limit": self.limit,
            "request_latency_ms": self.latency * 1e3,
            "highest_rate": None if (highest := self.highest_rate) is None else highest.summary(),
            "redundant_experts_per_rank": self.replicas,
            "handover": None if self.handover is None else self.handover.to_json(),
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
        }


class CannotCut(ValueError):
    """Neither the given sizes nor any of the model's divide the devices."""


class NothingFits(Exception):
    """No deployment has room for one request.

    Attributes:
        nearest: the deployment that lacks the fewest bytes.
        lacking: missing bytes on a rank.
    """

    def __init__(self, nearest: Deployment, lacking: float):
        super().__init__()
        self.nearest, self.lacking = nearest, lacking


def demand_json(demand: Demand) -> dict[str, Any]:
    return asdict(demand)
