"""What is predicted of a prefill and of a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsa_engine.commands.planner.prediction.deployment import Deployment
from dsa_engine.commands.planner.prediction.stages import StageTime, stages_json


@dataclass(frozen=True)
class Prefill:
    """A prefill of one prompt per context-parallel group, without other work.

    Attributes:
        ttft: seconds, without queueing.
        prompts_per_s: prompts per second of all groups.
        room: bytes that remain on a rank with the prompt in its caches; negative if it does not fit.
    """

    how: Deployment
    ttft: float
    prompts_per_s: float
    room: float
    stages: dict[str, StageTime]

    def to_json(self) -> dict[str, Any]:
        return {
            "deployment": self.how.to_json(),
            "ttft_ms": self.ttft * 1e3,
            "prompts_per_s": self.prompts_per_s,
            "room_bytes": self.room,
            "stages": stages_json(self.stages),
        }


@dataclass(frozen=True)
class DecodeStep:
    """A decode step.

    Attributes:
        requests: requests of all ranks of the instance.
        tpot: seconds per token of a request.
        tokens_per_step: tokens of a request per step, accepted drafts included.
        room: bytes that remain on a rank with all requests in its caches; negative if they do not fit.
        expert_bytes: bytes of one more expert in every layer.
    """

    how: Deployment
    requests: int
    tpot: float
    tokens_per_step: float
    room: float
    stages: dict[str, StageTime]
    expert_bytes: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all ranks of the instance."""
        return self.requests / self.tpot

    def to_json(self) -> dict[str, Any]:
        return {
            "deployment": self.how.to_json(),
            "requests": self.requests,
            "tpot_ms": self.tpot * 1e3,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s_per_device": self.tokens_per_s / self.how.ranks,
            "room_bytes": self.room,
            "stages": stages_json(self.stages),
        }
