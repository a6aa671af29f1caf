"""Seconds of a prefill and of a decode step: stages by the roofline, exchanges by the model of ``moe_dispatch="auto"``.

With one micro-batch a dispatch travels under the shared expert; with two, everything of an exchange that is no longer
than the computation does, which it slows down by the multiprocessors that it holds. Two micro-batches read the weights
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.roofline import Kernels, stage_seconds
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts, prefill_plans
from dsa_engine.measure.costs.work import Stages, times
from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.experts.traffic import Exchange, exchange

# Part of the multiprocessors that a running collective holds: 20 of 132, as DeepSeek-V3's report gives them.
COLLECTIVE = 20 / 132
EXCHANGE = "exchange of tokens"


@dataclass(frozen=True)
class Predicted:
    """A prefill of one prompt per context-parallel group, or a decode step, without other work.

    Attributes:
        dispatch, micro_batches: the fastest.
        seconds: of the prompt, or of a token of a request.
        requests: prompts or requests of all ranks of the instance.
        room: bytes that remain on a rank with all of them in its caches; negative if they do not fit.
        stages: seconds by stage, and of what they wait for.
    """

    how: Deployment
    dispatch: DispatchMethod
    micro_batches: int
    seconds: float
    requests: int
    room: float
    stages: dict[str, float]

    @property
    def per_s(self) -> float:
        """Prompts, or output tokens, of all ranks of the instance per second."""
        return self.requests / self.seconds


@lru_cache(maxsize=1 << 14)
def predict_prefill(placed: Placed, tokens: int, kernels: Kernels) -> Predicted:
    """A prefill of a prompt of ``tokens`` tokens by every context-parallel group."""
    how, config = placed.how, placed.config
    own, groups = cdiv(tokens, how.cp_size), how.ranks // how.cp_size
    chunk = min(how.chunk, own)

    def seconds(dispatch: DispatchMethod, micro: int) -> dict[str, float]:
        rows = cdiv(chunk, micro)
        work = _prefill_work(placed.costs, config, tokens, how.cp_size, rows, how.drafts, groups)
        stages = _timed("prefill", placed, kernels, work)
        passes = own / rows
        gathers, sharded = placed.collectives(rows, rows, 0)
        beside = sum(stages.get(name, 0.0) for name in ("MLA prolog", "indexer prolog"))
        stages["gathers of the cache"] = max(0.0, passes * gathers - beside)
        stages["tensor parallelism"] = passes * sharded
        _exchanged(stages, placed, dispatch, rows, passes, micro)
        return stages

    return _fastest(
        placed, seconds, 1.0, groups, lambda dispatch: placed.cache_room(chunk, dispatch) - tokens * placed.token_bytes
    )


@lru_cache(maxsize=1 << 16)
def predict_decode(
    placed: Placed, requests: int, context: int, tokens_per_step: float, longest: int, kernels: Kernels
) -> Predicted:
    """A decode step.

    Args:
        requests: requests of all ranks, divided evenly.
        context: tokens that a request sees on average.
        tokens_per_step: tokens of a request per step; 1 without drafts.
        longest: tokens in a request's pages at its end.
    """
    how, own = placed.how, cdiv(requests, placed.how.ranks)

    def seconds(dispatch: DispatchMethod, micro: int) -> dict[str, float]:
        each = cdiv(own, micro)
        step = Decode(each, requests * each // own, context + how.drafts, how.drafts)
        rows, eager = each * (1 + how.drafts), dispatch != "all_gather"
        verification, drafts = _decode_work(placed.costs, step)
        stages = _timed("decode", placed, kernels, times(verification, micro), eager)
        stages["tensor parallelism"] = micro * placed.collectives(rows, 0, rows)[1]
        _exchanged(stages, placed, dispatch, rows, micro, micro)
        if how.drafts:
            drafting = _timed("decode", placed, kernels, times(drafts, micro), eager)
            stages["drafts"] = sum(drafting.values()) + micro * how.drafts * _exchange(placed, dispatch, each).seconds
        return stages

    rows = own * (1 + how.drafts)
    return _fastest(
        placed,
        seconds,
        tokens_per_step,
        requests,
        lambda dispatch: placed.cache_room(rows, dispatch) - own * longest * placed.token_bytes,
        micro_batches=2 if own > 1 else 1,
    )


def _fastest(
    placed: Placed,
    seconds: Callable[[DispatchMethod, int], dict[str, float]],
    tokens: float,
    requests: int,
    room: Callable[[DispatchMethod], float],
    micro_batches: int = 2,
) -> Predicted:
    """The fastest dispatch that has room, or the one with the most room; ``seconds`` are of ``tokens`` tokens."""
    predicted = []
    for dispatch in _dispatches(placed):
        for micro in range(1, 1 + (micro_batches if placed.how.ranks > 1 else 1)):
            stages = seconds(dispatch, micro)
            taken = sum(stages.values()) / tokens
            predicted.append(Predicted(placed.how, dispatch, micro, taken, requests, room(dispatch), stages))
    fitting = [one for one in predicted if one.room >= 0]
    return min(fitting, key=lambda one: one.seconds) if fitting else max(predicted, key=lambda one: one.room)


def _dispatches(placed: Placed) -> Iterator[DispatchMethod]:
    yield "all_gather"
    if placed.how.ranks > 1:
        yield "all_to_all"
    if 1 < placed.nodes < placed.how.ranks:
        yield "by_node"


def _timed(phase: str, placed: Placed, kernels: Kernels, work: Stages, eager: bool = False) -> dict[str, float]:
    return {name: stage_seconds(phase, name, one, placed.device, kernels, eager) for name, one in work.items()}


def _exchange(placed: Placed, dispatch: DispatchMethod, rows: float) -> Exchange:
    return exchange(dispatch, rows, placed.how.ranks, placed.nodes, placed.row, placed.routing, placed.links)


def _exchanged(
    stages: dict[str, float], placed: Placed, dispatch: DispatchMethod, rows: float, passes: float, micro: int
) -> None:
    """Adds what ``passes`` passes over ``rows`` rows each wait for the exchange of their tokens."""
    layers, one = placed.config.mlp_layer_types.count("sparse"), _exchange(placed, dispatch, rows)
    there, back = layers * passes * one.there, layers * passes * one.back
    if micro == 1:
        stages[EXCHANGE] = max(0.0, there - stages.get("MoE shared", 0.0)) + back
        return
    computed = sum(stages.values())
    stages[EXCHANGE] = max(there + back, computed + COLLECTIVE * (there + back)) - computed


@lru_cache(maxsize=1 << 10)
def _plans(config: ModelConfig, tokens: int, cp_size: int, chunk: int) -> list[StepPlan]:
    return prefill_plans(config, tokens, cp_size, chunk)


@lru_cache(maxsize=1 << 14)
def _decode_work(costs: ModelCosts, step: Decode) -> tuple[Stages, Stages]:
    return costs.verification(step), costs.drafting(step)


@lru_cache(maxsize=1 << 14)
def _prefill_work(
    costs: ModelCosts, config: ModelConfig, tokens: int, cp_size: int, chunk: int, drafts: int, groups: int
) -> Stages:
    return costs.prefill(_plans(config, tokens, cp_size, chunk), 0, drafts, groups)
