"""Seconds of a prefill and of a decode step, stage by stage, with the limit of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from dsa_engine.commands.planner.prediction.deployment import Placed
from dsa_engine.commands.planner.prediction.efficiency import (
    COLLECTIVE,
    L2_BANDWIDTH,
    PREFETCHED,
    TOP_K,
    Efficiencies,
)
from dsa_engine.commands.planner.prediction.predicted import DecodeStep, Prefill
from dsa_engine.commands.planner.prediction.stages import LINKS, StageTime, add, communicate, timed
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.batch_schedule import COMBINE, DISPATCH, Exchange, LayerTimes, schedule
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts, halved_prefill_plans, prefill_plans
from dsa_engine.measure.costs.work import Stages

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
        stages = timed("prefill", placed, reached, work, own / len(steps))
        last = steps[-1] if number == len(plans) - 1 else None
        sizes = Counter((s.ranks[0].rows, max(plan.rows for plan in s.ranks), s is last) for s in steps)
        exchange = Exchange()
        for (rows, gathered, has_logits), count in sizes.items():
            communicate(stages, placed, rows, gathered, int(has_logits), len(steps), count)
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
        stages = timed("decode", placed, reached, work, rows, eager=dispatch != "all_gather")
        if how.prefetch_weights and len(parts) == 1:
            _prefetch(stages, placed, reached, exchange.combine)
        communicate(stages, placed, rows, 0, rows)
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
    stages = timed("decode", placed, reached, placed.costs.drafting(step), step.requests * (1 + step.drafts))
    layers = placed.config.num_hidden_layers
    beside = stages["MoE shared"].seconds / step.drafts if placed.how.beside_shared and "MoE shared" in stages else 0.0
    for number in range(step.drafts):
        rows = step.requests * (1 + step.drafts if number == 0 else 1)
        for name, seconds, _ in placed.collectives(rows, 0, step.requests):
            add(stages, name, seconds if name in ("LM head", "embedding") else seconds / layers)
        dispatch = placed.exchange.method(placed.how.dispatch, rows, static=True)
        exchange = placed.exchange.of(dispatch, rows)
        hidden = min(exchange.dispatch, beside)
        add(stages, DISPATCH, exchange.dispatch - hidden, hidden)
        add(stages, COMBINE, exchange.combine)
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
    add(stages, DISPATCH, waits.dispatch * steps, (waits.dispatched - waits.dispatch) * steps)
    add(stages, COMBINE, waits.combine * steps, (waits.combined - waits.combine) * steps)
    if waits.slowed:
        stages[SLOWED] = StageTime(waits.slowed * steps, 0.0, LINKS)
    return stages


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
