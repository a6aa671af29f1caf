"""Seconds of a prefill and of a decode step, stage by stage, with the limit of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.efficiency import (
    COLLECTIVE,
    L2_BANDWIDTH,
    PREFETCHED,
    TOP_K,
    Efficiencies,
    Products,
    stage_seconds,
)
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.linear.block_scaled_matmul import QUANTISED_ROWS
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.batch_schedule import COMBINE, DISPATCH, Exchange, LayerTimes, schedule
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts, halved_prefill_plans, prefill_plans
from dsa_engine.measure.costs.work import SCORE_BYTES, Stages, Work

LINKS = "links"
SLOWED = "beside collectives"  # time that other stages lose to collectives on the same device
_ATTENTION = (
    "MLA prolog",
    "indexer prolog",
    "lightning indexer",
    TOP_K,
    "sparse flash attention",
    "MLA epilog",
    "communication",
)


@dataclass(frozen=True)
class StageTime:
    """Seconds of computation, seconds of communication that no work overlaps, and the largest part."""

    computed: float
    communicated: float
    limit: str
    hidden: float = 0.0  # seconds of communication under other work

    @property
    def seconds(self) -> float:
        return self.computed + self.communicated

    def __add__(self, other: StageTime) -> StageTime:
        limit = max(self, other, key=lambda one: one.seconds).limit
        sums = (self.computed + other.computed, self.communicated + other.communicated)
        return StageTime(*sums, limit, self.hidden + other.hidden)


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
        name: {
            "computed_ms": t.computed * 1e3,
            "communication_ms": t.communicated * 1e3,
            "hidden_communication_ms": t.hidden * 1e3,
            "limit": t.limit,
        }
        for name, t in stages.items()
    }


def predict_prefill(placed: Placed, reached: Efficiencies, tokens: int, prompts: int = 1) -> Prefill:
    """A prefill of ``prompts`` prompts of ``tokens`` tokens by every context-parallel group, one after the other."""
    how, groups = placed.how, placed.how.ranks // placed.how.cp_size
    cut = (placed.config, tokens, how.cp_size, how.chunk, how.two_batches)
    plans = _plans(*cut)
    batches = []
    for number, steps in enumerate(plans):
        own, everyone = sum(step.ranks[0].rows for step in steps), sum(sum(p.rows for p in s.ranks) for s in steps)
        dispatch = placed.exchange.method(how.dispatch, own / len(steps))
        work = _prefill_work(placed.costs, cut, number, how.drafts, groups)
        work = placed.dispatched(work, own, groups * everyone, dispatch)
        stages = _timed("prefill", placed, reached, work, own / len(steps))
        last = steps[-1] if number == len(plans) - 1 else None
        sizes = Counter((s.ranks[0].rows, max(plan.rows for plan in s.ranks), s is last) for s in steps)
        exchange = Exchange()
        for (rows, gathered, has_logits), count in sizes.items():
            _communicate(stages, placed, rows, gathered, int(has_logits), len(steps), count)
            exchange = exchange.plus(placed.exchange.of(dispatch, rows).scaled(count))
        batches.append(_Batch(stages, exchange, len(steps)))
    stages = _passed(placed, batches)
    ttft = sum(stage.seconds for stage in stages.values()) * prompts
    room = placed.cache_room(min(how.chunk, cdiv(tokens, how.cp_size))) - tokens * placed.token_bytes
    return Prefill(how, ttft, prompts * groups / ttft, room, stages)


def predict_decode(
    placed: Placed, reached: Efficiencies, requests: int, context: int, tokens_per_step: float, longest: int
) -> DecodeStep:
    """A decode step. It is cut into two batches if every rank has two requests.

    Args:
        requests: requests of all ranks, divided evenly.
        context: tokens that a request sees on average.
        tokens_per_step: tokens of a request per step; 1 without drafts.
        longest: tokens in a request's pages at its end.
    """
    how, own = placed.how, cdiv(requests, placed.how.ranks)
    step = Decode(own, requests, context + how.drafts, how.drafts)
    parts = [step]
    if how.two_batches and own > 1:
        half = cdiv(own, 2)
        of_all = requests * half // own
        parts = [
            step._replace(requests=r, world_requests=w) for r, w in ((half, of_all), (own - half, requests - of_all))
        ]
    batches = []
    for part in parts:
        rows, all_rows = (count * (1 + how.drafts) for count in (part.requests, part.world_requests))
        dispatch = placed.exchange.method(how.dispatch, rows, static=True)
        work = placed.dispatched(placed.costs.verification(part), rows, all_rows, dispatch)
        exchange = placed.exchange.of(dispatch, rows)
        stages = _timed("decode", placed, reached, work, rows, eager=dispatch != "all_gather")
        if how.prefetch_weights and len(parts) == 1:
            _prefetch(stages, placed, reached, exchange.combine)
        _communicate(stages, placed, rows, 0, rows)
        batches.append(_Batch(stages, exchange, 1))
    stages = _passed(placed, batches)
    for name, time in _drafting(placed, reached, step).items():
        stages[name] = stages[name] + time if name in stages else time
    seconds = sum(stage.seconds for stage in stages.values())
    rows = own * (1 + how.drafts)
    room = placed.cache_room(rows) - own * longest * placed.token_bytes
    return DecodeStep(how, requests, seconds / tokens_per_step, tokens_per_step, room, stages, placed.expert_bytes)


def _prefetch(stages: dict[str, StageTime], placed: Placed, reached: Efficiencies, combine: float) -> None:
    """Shortens the prolog of each layer after one with experts: weights that memory delivers in the time of the combine
    are read from L2. The time that the combine may lose to them is not modelled."""
    name, moes = "MLA prolog", placed.config.mlp_layer_types.count("sparse")
    if moes < 2 or name not in stages or stages[name].limit == "compute":
        return
    rate = placed.device.bandwidth * reached.of("decode", name).memory
    held = placed.costs.weights.layers["sparse", placed.config.indexer_types[-1]][name]
    brought = min(PREFETCHED, held, combine * rate)
    saved = (moes - 1) * brought * max(0.0, 1 / rate - 1 / L2_BANDWIDTH)
    stages[name] = replace(stages[name], computed=stages[name].computed - saved)


def _drafting(placed: Placed, reached: Efficiencies, step: Decode) -> dict[str, StageTime]:
    """The passes that draft, each one MoE layer and a head, in one batch."""
    stages = _timed("decode", placed, reached, placed.costs.drafting(step), step.requests * (1 + step.drafts))
    layers = placed.config.num_hidden_layers
    for number in range(step.drafts):
        rows = step.requests * (1 + step.drafts if number == 0 else 1)
        for name, seconds, _ in placed.collectives(rows, 0, step.requests):
            _add(stages, name, seconds if name in ("LM head", "embedding") else seconds / layers)
        dispatch = placed.exchange.method(placed.how.dispatch, rows, static=True)
        exchange = placed.exchange.of(dispatch, rows)
        _add(stages, DISPATCH, exchange.dispatch)
        _add(stages, COMBINE, exchange.combine)
    return stages


@dataclass(frozen=True)
class _Batch:
    """One batch in all steps: its stages without the experts' exchange, and that of one layer, summed over steps."""

    stages: dict[str, StageTime]
    exchange: Exchange
    steps: int

    def layers(self, config: ModelConfig, beside_shared: bool, sparse_layers: int) -> list[LayerTimes]:
        """Seconds of the dense layers and of some sparse ones in the mean step."""
        moes, steps = config.mlp_layer_types.count("sparse"), self.steps
        every = sum(self._seconds(name) for name in _ATTENTION) / config.num_hidden_layers / steps
        mlp = self._seconds("dense MLP") / max(1, config.num_hidden_layers - moes) / steps
        gate = (self._seconds("MoE gate") + self._seconds(COMBINE)) / max(1, moes) / steps
        shared, experts = (self._seconds(name) / max(1, moes) / steps for name in ("MoE shared", "MoE experts"))
        before = every + gate + (0.0 if beside_shared else shared)
        sparse = LayerTimes(before, self.exchange.scaled(1 / steps), shared * beside_shared, experts)
        dense = LayerTimes(every + mlp)
        return [dense] * (config.num_hidden_layers - moes) + [sparse] * sparse_layers

    def _seconds(self, name: str) -> float:
        return self.stages[name].seconds if name in self.stages else 0.0


def _passed(placed: Placed, batches: list[_Batch]) -> dict[str, StageTime]:
    """The stages of all batches, with what they wait for the experts' exchange."""
    stages: dict[str, StageTime] = {}
    for batch in batches:
        for name, time in batch.stages.items():
            stages[name] = stages[name] + time if name in stages else time
    if placed.how.ranks == 1 or not placed.config.mlp_layer_types.count("sparse"):
        return stages
    beside = placed.how.beside_shared or len(batches) > 1
    moes = placed.config.mlp_layer_types.count("sparse")
    # Layers of one batch take equally long; those of two do from the third on.
    few = min(moes, 1 if len(batches) == 1 else 4)
    waits = schedule([batch.layers(placed.config, beside, few) for batch in batches], COLLECTIVE)
    if moes > few:
        one_less = schedule([batch.layers(placed.config, beside, few - 1) for batch in batches], COLLECTIVE)
        waits = waits.extended(one_less, moes - few)
    steps = batches[0].steps
    _add(stages, DISPATCH, waits.dispatch * steps, (waits.dispatched - waits.dispatch) * steps)
    _add(stages, COMBINE, waits.combine * steps, (waits.combined - waits.combine) * steps)
    if waits.slowed:
        stages[SLOWED] = StageTime(waits.slowed * steps, 0.0, LINKS)
    return stages


def _timed(
    phase: str, placed: Placed, reached: Efficiencies, work: Stages, rows: float, eager: bool = False
) -> dict[str, StageTime]:
    """The stages of passes over ``rows`` rows each."""
    stages = {}
    if not reached.has_measured(phase, "lightning indexer"):
        work = _top_k_apart(placed.config, work)
    for name, one in work.items():
        products = _products(placed, rows * placed.how.tp_size if name == "MLA epilog" else rows)
        seconds, limit = stage_seconds(one, placed.device, reached.of(phase, name, products, eager))
        stages[name] = StageTime(seconds, 0.0, limit)
    return stages


def _products(placed: Placed, rows: float) -> Products:
    """The products of linear layers over so many rows."""
    if not placed.costs.formats.narrow_linear:
        return "plain"
    if placed.how.weights != "fp8":
        return "int8"
    return "fp8" if rows <= QUANTISED_ROWS else "fp8_many"


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


def _add(stages: dict[str, StageTime], name: str, seconds: float, hidden: float = 0.0) -> None:
    old = stages.get(name, StageTime(0.0, 0.0, LINKS))
    communicated = old.communicated + seconds
    limit = LINKS if communicated > old.computed else old.limit
    stages[name] = StageTime(old.computed, communicated, limit, old.hidden + max(0.0, hidden))


_Cut = tuple[ModelConfig, int, int, int, bool]  # config, tokens, cp_size, chunk, two batches


@lru_cache(maxsize=64)
def _plans(config: ModelConfig, tokens: int, cp_size: int, chunk: int, two_batches: bool) -> tuple[list[StepPlan], ...]:
    """The steps of every batch."""
    if two_batches and tokens >= 2 * cp_size:
        return halved_prefill_plans(config, tokens, cp_size, chunk)
    return (prefill_plans(config, tokens, cp_size, chunk),)


@lru_cache(maxsize=1024)
def _prefill_work(costs: ModelCosts, cut: _Cut, batch: int, drafts: int, groups: int) -> Stages:
    return costs.prefill(_plans(*cut)[batch], 0, drafts, groups)
