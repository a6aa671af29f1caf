"""Seconds of a prefill and of a decode step, stage by stage, with the limit of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.efficiency import TOP_K, Efficiencies, stage_seconds
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.model_costs import Decode, prefill_plans
from dsa_engine.measure.costs.work import SCORE_BYTES, Stages, Work

LINKS = "links"


@dataclass(frozen=True)
class StageTime:
    """Seconds of computation, seconds of communication that no work overlaps, and the largest part."""

    computed: float
    communicated: float
    limit: str

    @property
    def seconds(self) -> float:
        return self.computed + self.communicated


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


def stages_json(stages: dict[str, StageTime]) -> dict[str, Any]:
    return {
        name: {"computed_ms": t.computed * 1e3, "communication_ms": t.communicated * 1e3, "limit": t.limit}
        for name, t in stages.items()
    }


def predict_prefill(placed: Placed, reached: Efficiencies, tokens: int, prompts: int = 1) -> Prefill:
    """A prefill of ``prompts`` prompts of ``tokens`` tokens by every context-parallel group, one after the other."""
    how, groups = placed.how, placed.how.ranks // placed.how.cp_size
    steps = _plans(placed.config, tokens, how.cp_size, how.chunk)
    own = sum(step.ranks[0].rows for step in steps)
    work = placed.dispatched(placed.costs.prefill(steps, 0, how.drafts, groups), own, groups * tokens)
    stages = _timed("prefill", placed, reached, work)
    sizes = Counter((step.ranks[0].rows, max(plan.rows for plan in step.ranks), step is steps[-1]) for step in steps)
    for (rows, gathered, last), count in sizes.items():
        _communicate(stages, placed, rows, gathered, int(last), len(steps), count)
    ttft = sum(stage.seconds for stage in stages.values()) * prompts
    room = placed.cache_room(min(how.chunk, cdiv(tokens, how.cp_size))) - tokens * placed.token_bytes
    return Prefill(how, ttft, prompts * groups / ttft, room, stages)


def predict_decode(
    placed: Placed, reached: Efficiencies, requests: int, context: int, tokens_per_step: float, longest: int
) -> DecodeStep:
    """A decode step.

    Args:
        requests: requests of all ranks, divided evenly.
        context: tokens that a request sees on average.
        tokens_per_step: tokens of a request per step; 1 without drafts.
        longest: tokens in a request's pages at its end.
    """
    how, own = placed.how, cdiv(requests, placed.how.ranks)
    step = Decode(own, requests, context + how.drafts, how.drafts)
    rows = own * (1 + how.drafts)
    work = placed.dispatched(placed.costs.decode(step), rows, requests * (1 + how.drafts))
    stages = _timed("decode", placed, reached, work)
    _communicate(stages, placed, rows, 0, rows)
    for number in range(how.drafts):  # each pass is one more MoE layer and head
        few = rows if number == 0 else own
        part = 1 / max(1, placed.config.mlp_layer_types.count("sparse"))
        for name, seconds, _ in placed.collectives(few, 0, own):
            fraction = 1.0 if name in ("LM head", "embedding") else part
            _add(stages, name, seconds * fraction)
    seconds = sum(stage.seconds for stage in stages.values())
    room = placed.cache_room(rows) - own * longest * placed.token_bytes
    return DecodeStep(how, requests, seconds / tokens_per_step, tokens_per_step, room, stages, placed.expert_bytes)


def _timed(phase: str, placed: Placed, reached: Efficiencies, work: Stages) -> dict[str, StageTime]:
    stages = {}
    if not reached.has_measured(phase, "lightning indexer"):
        work = _top_k_apart(placed.config, work)
    for name, one in work.items():
        seconds, limit = stage_seconds(one, placed.device, reached.of(phase, name))
        stages[name] = StageTime(seconds, 0.0, limit)
    return stages


def _top_k_apart(config: ModelConfig, work: Stages) -> Stages:
    """The stages with the selection as one of its own: it reads the scores after all of them have been written."""
    apart: Stages = {}
    for name, one in work.items():
        apart[name] = one
        if name == "lightning indexer":
            pairs = one.flops / (2 * config.index_n_heads * (config.index_head_dim + 1))
            scores = SCORE_BYTES * pairs
            apart[name] = replace(one, activations=one.activations - scores)
            apart[TOP_K] = Work(activations=scores, passes=one.passes)
    return apart


def _communicate(
    stages: dict[str, StageTime], placed: Placed, rows: int, gathered: int, logits: int, steps: int = 1, count: int = 1
) -> None:
    """Adds the collectives of ``count`` of ``steps``. The gather of cache rows overlaps with the queries' prolog, which
    consists mainly of q_b and the absorption."""
    for name, seconds, hides in placed.collectives(rows, gathered, logits):
        if hides:
            beside = sum(stages[n].computed for n in ("MLA prolog", "indexer prolog") if n in stages) / steps
            seconds = max(0.0, seconds - beside)
        _add(stages, name, seconds * count)


def _add(stages: dict[str, StageTime], name: str, seconds: float) -> None:
    old = stages.get(name, StageTime(0.0, 0.0, LINKS))
    communicated = old.communicated + seconds
    stages[name] = StageTime(old.computed, communicated, LINKS if communicated > old.computed else old.limit)


@lru_cache(maxsize=64)
def _plans(config: ModelConfig, tokens: int, cp_size: int, chunk: int) -> list[StepPlan]:
    return prefill_plans(config, tokens, cp_size, chunk)
