"""Options that an engine chooses at its start, beside the best that the search of ``dsa-engine plan`` finds.

Both are timed by the planner's model, on the same ranks, with the same format of weights and no drafts. `-s` prints the
table: ``pytest -s tests/commands/planner/test_choice.py -k table``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from dsa_engine.commands.planner import predict
from dsa_engine.commands.planner.demand import Demand
from dsa_engine.commands.planner.deployment import Deployment, stored
from dsa_engine.commands.planner.devices import DEVICES
from dsa_engine.commands.planner.search import LOADS, Planner
from dsa_engine.config.fields import is_given
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.startup.choice import RULES, Choice, Devices
from dsa_engine.measure.report import format_table
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import ParallelConfig
from dsa_engine.weights.model_folder import model_config

MODELS, KINDS, RANKS = ("deepseek_v32", "glm_moe_dsa", "deepseek_v3"), ("H100", "H200", "B200"), (1, 4, 8, 16, 64)
MODES = ("latency", "balanced", "throughput")
INPUT, OUTPUT = 131_072, 1024
WITHIN = 1.06
DBO_ROWS = (32, 512)  # a rank, from which decode and prefill are cut in micro-batches


class OneInstance(Planner):
    """Searches instances of all devices only, and ``tp_size`` of a node that is not full too."""

    def _formats(self) -> Iterator[Deployment]:
        return (how for how in super()._formats() if how.ranks == self.demand.devices)


def target(mode: str, seconds: float, seconds_of_token: float, requests: int) -> float:
    """Lower is better. Latency: of one request alone. Throughput: time of the instance for a token. Balanced: the
    geometric mean of both."""
    latency, of_token = seconds + OUTPUT * seconds_of_token, seconds_of_token / requests
    return {"latency": latency, "throughput": of_token, "balanced": math.sqrt(latency * of_token)}[mode]


@cache
def fitting(model: str, kind: str, ranks: int) -> tuple[ModelConfig, str, tuple[Any, ...], Planner]:
    """The first of these that has room for a request: the model in FP8, with INT4 experts, in FP8 with fewer layers;
    and all plans for it."""
    for weights, layers in (
        ("fp8", None),
        ("int4-experts", None),
        *(("fp8", layers) for layers in (40, 30, 20, 15, 10, 8)),
    ):
        config = model_config(model, {} if layers is None else {"num_hidden_layers": layers})
        fixed: dict[str, Any] = {"drafts": 0, "weights": weights, "dcp_size": 1}
        if weights != "fp8" and config.has_indexer:
            fixed["cache"] = "bfloat16"  # FP8 caches are not chosen for other weights
        planner, plans = OneInstance(config, DEVICES[kind], Demand(ranks, INPUT, OUTPUT), fixed), []
        for tp_size in {1, min(8, ranks)}:
            planner.fixed = fixed | {"tp_size": tp_size}
            plans += list(planner._plans())
        if plans:
            return config, weights, tuple(plans), planner
    raise AssertionError("nothing fits")


def chosen(config: ModelConfig, weights: str, kind: str, ranks: int, mode: str, **options: Any) -> Choice:
    device = DEVICES[kind]
    devices = Devices(ranks, min(ranks, device.node_size), int(device.memory_gb * 1e9))
    return Choice(EngineOptions(optimize=mode, **options), config, devices, INPUT + OUTPUT, stored(weights, config))  # type: ignore[arg-type]


def timed(choice: Choice, weights: str, planner: Planner, mode: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """The target of what is chosen, at the best load that it admits and has room for."""
    values, ranks = choice.values, choice.devices.ranks
    kv = "fp8" if values["kv_cache_dtype"] == "fp8" else "bfloat16"
    sizes = values["cp_size"], values["tp_size"], values["max_num_batched_tokens"]
    how = Deployment(ranks, *sizes, weights=weights, cache=kv)
    placed, dbo = planner.placed(how), values["enable_dbo"] and ranks > 1

    def micro(rows: int, least: int) -> Callable[..., Any]:
        number = 2 if dbo and rows >= least else 1
        return lambda seconds, _: (seconds(number), number)

    monkeypatch.setattr(predict, "_faster", micro(min(how.chunk, -(-INPUT // how.cp_size)), DBO_ROWS[1]))
    prefill = predict.predict_prefill(placed, INPUT, predict.OWN)
    targets = []
    for requests in [1] if mode == "latency" else sorted({1, *LOADS}):
        monkeypatch.setattr(predict, "_faster", micro(-(-requests // ranks), DBO_ROWS[0]))
        decode = predict.predict_decode(placed, requests, planner.demand, predict.OWN)
        prompt = INPUT * placed.token_bytes if requests > 1 else 0
        if requests <= values["max_num_seqs"] and min(prefill.room, decode.room - prompt) >= 0:
            waited = requests * prefill.seconds / prefill.requests / OUTPUT
            targets.append(target(mode, prefill.seconds, decode.seconds + waited, requests))
    monkeypatch.undo()
    return min(targets, default=math.inf)


@pytest.mark.parametrize("model", MODELS)
def test_table(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen is within 6% of the best that the search finds, for each model, device, number of ranks, aim."""
    rows, over = [], []
    for kind in KINDS:
        for ranks in RANKS:
            config, weights, plans, planner = fitting(model, kind, ranks)
            for mode in MODES:
                choice = chosen(config, weights, kind, ranks, mode)
                own = timed(choice, weights, planner, mode, monkeypatch)

                def of_plan(plan: Any, mode: str = mode) -> float:
                    load = plan.decode.requests
                    return target(mode, plan.ttft, plan.tpot, load) if mode != "latency" or load == 1 else math.inf

                best = min(plans, key=of_plan)
                how, ratio = best.prefill.how, own / of_plan(best)
                v = choice.values
                case = (f"{kind} × {ranks}", f"{weights} {config.num_hidden_layers}", mode)
                ours = (v["cp_size"], v["tp_size"], v["max_num_batched_tokens"], v["kv_cache_dtype"])
                ours += (v["enable_dbo"], v["max_num_seqs"])
                theirs = (
                    how.cp_size,
                    how.tp_size,
                    how.chunk,
                    how.cache,
                    best.prefill.micro_batches,
                    best.decode.requests,
                )
                rows.append((*case, *(" ".join(map(str, one)) for one in (ours, theirs)), f"{ratio:.3f}"))
                if ratio > WITHIN:
                    over.append(rows[-1])
    print(
        f"\n{model}\n"
        + format_table(
            (
                "device",
                "weights, layers",
                "aim",
                "chosen: cp tp chunk kv dbo seqs",
                "best: cp tp chunk kv micro requests",
                "time",
            ),
            rows,
        )
    )
    assert not over


def test_what_is_given_wins() -> None:
    """Also a value that is a default; what is left out follows from it."""
    config = model_config("deepseek_v32", {})
    given = {"max_num_seqs": 64, "kv_cache_dtype": "bfloat16", "enable_dbo": False, "max_num_batched_tokens": 8192}
    parallel = ParallelConfig(tp_size=1, cp_size=4, dcp_size=2, moe_dispatch="all_to_all", redundant_experts=0)
    choice = chosen(config, "fp8", "H200", 8, "throughput", **given, parallel=parallel)
    assert choice.chosen == {} and choice.applied() == EngineOptions(optimize="throughput", **given, parallel=parallel)
    some = chosen(config, "fp8", "H200", 8, "throughput", max_num_seqs=64, parallel=ParallelConfig(cp_size=4))
    applied = some.applied()
    assert (applied.max_num_seqs, applied.parallel.cp_size, applied.kv_cache_dtype) == (64, 4, "fp8")
    assert (applied.enable_dbo, applied.parallel.tp_size, applied.parallel.moe_dispatch) == (True, 8, "auto")


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4-experts"])
def test_fp8_caches_are_never_chosen_for_other_weights(weights: str) -> None:
    for mode in MODES:
        choice = chosen(model_config("deepseek_v32", {}), weights, "B200", 64, mode)
        assert (
            choice.values["kv_cache_dtype"] == "auto" and "FP8 would change numbers" in choice.reasons["kv_cache_dtype"]
        )


def test_replicas_need_loads() -> None:
    config = model_config("deepseek_v32", {})
    for parallel, replicas in ((ParallelConfig(), 0), (ParallelConfig(rebalance_every=5000), 64)):
        choice = chosen(config, "fp8", "H200", 64, "balanced", parallel=parallel)
        assert choice.applied().parallel.redundant_experts == replicas


def test_a_cpu_keeps_its_defaults() -> None:
    choice = Choice(EngineOptions(), model_config("deepseek_v32", {}), Devices(4, 4, None), 4096, None)
    assert choice.applied() == EngineOptions(enable_dbo=False, parallel=ParallelConfig(cp_size=4))
    assert set(choice.reasons.values()) == {"the default on a CPU"}


def test_what_was_chosen_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rule chose it, also one that keeps a default."""
    monkeypatch.setitem(RULES, "max_num_seqs", lambda choice: (choice.values["max_num_seqs"], "the default"))
    for memory in (None, 141 * 10**9):
        config = model_config("deepseek_v32", {})
        choice = Choice(EngineOptions(), config, Devices(4, 4, memory), 4096, config.quantization)
        assert all(map(is_given, choice.values.values()))


@pytest.mark.parametrize("ranks, node", [(1, 1), (2, 2), (3, 3), (6, 2), (12, 4), (16, 1), (20, 8), (72, 8), (512, 8)])
def test_sizes_divide_any_world(ranks: int, node: int) -> None:
    config = model_config("deepseek_v32", {})
    for mode in MODES:
        devices, options = Devices(ranks, node, 141 * 10**9), EngineOptions(optimize=mode)  # type: ignore[arg-type]
        values = Choice(options, config, devices, 163_840, config.quantization).values
        assert ranks % values["cp_size"] == ranks % values["tp_size"] == node % values["tp_size"] == 0
        assert values["max_num_seqs"] >= 8 and values["max_num_batched_tokens"] >= 2048


@pytest.mark.parametrize(
    "model, kind, ranks, longest, size",
    [
        ("deepseek_v32", "H200", 8, 163_840, 1),
        ("glm_moe_dsa", "H200", 8, 1_048_576, 4),
        ("glm_moe_dsa", "H100", 16, 1_048_576, 8),
        ("glm_5_2", "H200", 8, 1_048_576, 4),  # with tp_size 8; the plan's tp_size 1 leaves 9.5 GiB less: 8
        ("glm_5_2", "H100", 16, 1_048_576, 8),  # with rows of two layers beside a quarter of the pages
        ("glm_moe_dsa", "H100", 64, 202_752, 1),
    ],
)
def test_ranks_hold_together_what_none_holds_alone(model: str, kind: str, ranks: int, longest: int, size: int) -> None:
    """The fewest, in a node; chunks of the prefill stay long."""
    device, config = DEVICES[kind], model_config(model, {})
    devices = Devices(ranks, 8, int(device.memory_gb * 1e9))
    choice = Choice(EngineOptions(), config, devices, longest, config.quantization)
    assert choice.values["dcp_size"] == size and choice.values["cp_size"] % size == 0
    assert choice.values["max_num_batched_tokens"] == 4096
    invariant = Choice(EngineOptions(batch_invariant=True), config, devices, longest, config.quantization)
    assert invariant.values["dcp_size"] == 1
