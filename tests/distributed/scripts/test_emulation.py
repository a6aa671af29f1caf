"""An emulated rank and the same rank of a true run of four processes have equal counts."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.llm import LLM
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.requests import random_prompt

WORLD = 4
OPTIONS = {"device": "cpu", "max_model_len": 1024, "cache_memory": "16MiB", "max_num_batched_tokens": 96}


def case(name: str, parallel: dict[str, Any], batches: list[list[int]], **more: Any) -> dict[str, Any]:
    prompts = [[[4 + (i * 7 + n) % 300 for i in range(n)] for n in lengths] for lengths in batches]
    return {"name": name, "world_size": WORLD, "parallel": parallel, "options": OPTIONS, "prompts": prompts} | more


# Lengths past the demo's index_topk (256) and below. Ranks have equally many tokens, as an emulated one assumes.
CASES = [
    case("all_to_all", {"decode_dispatch": "all_to_all"}, [[336], [96]]),
    case("all_gather, tp", {"moe_dispatch": "all_gather", "tp_size": 2}, [[336], [48]]),
    case("tp over all", {"tp_size": 4}, [[288], [96]]),
    case("contexts together", {"dcp_size": 2, "decode_dispatch": "all_gather"}, [[336], [96]]),
    case("two nodes, auto in decode", {"decode_dispatch": "auto"}, [[288], [96]], nodes=[0, 0, 1, 1]),
]


@pytest.fixture(scope="module")
def worker() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "programs" / "emulation_worker.py")))


@pytest.fixture(scope="module")
def truth(
    rank_results: Callable[..., list[Any]], demo_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Counts of every rank of one true run, by name of the case."""
    return rank_results(WORLD, "emulation_worker.py", CASES, tmp_path_factory.mktemp("true"))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("described", CASES, ids=lambda c: c["name"])
def test_counts_of_a_true_run(
    described: dict[str, Any], rank: int, truth: list[dict[str, Any]], worker: SimpleNamespace
) -> None:
    true, emulated = truth[rank][described["name"]], worker.run_case(described, emulate_rank=rank)
    seconds = [run.pop("seconds") for run in (true, emulated)]
    print(f"{described['name']}, rank {rank}: true run {seconds[0]:.2f} s with its waits, emulated {seconds[1]:.2f} s")
    assert emulated["collectives"] == true["collectives"], "in kind, ranks, bytes to and from each, and order"
    assert emulated["expert_pairs"] == true["expert_pairs"], "what arrives at this rank's experts, in every layer"
    # An emulated mesh has no groups by node: nothing travels in those of a true one, which come last.
    emulated["bytes_sent"] += [0] * (len(true["bytes_sent"]) - len(emulated["bytes_sent"]))
    assert emulated == true
    assert sum(true["tokens"]) > 60 and true["bytes_sent"][0] > 0 and len(true["expert_pairs"]) > 3


def test_the_true_ranks_share_the_work(truth: list[dict[str, Any]]) -> None:
    """All ranks assign the same experts: these get as many tokens as all ranks' tokens have chosen."""
    for described in CASES:
        runs = [rank[described["name"]] for rank in truth]
        for step in range(len(runs[0]["tokens"])):
            layers = range(3 * step, 3 * step + 3)  # the demo has three MoE layers
            for layer in layers:
                pairs = sum(sum(run["expert_pairs"][layer][1]) for run in runs)
                assert pairs == 4 * sum(run["tokens"][step] for run in runs)


def test_prefill_of_a_true_run(
    fork_ranks: Callable[..., Any], demo_cache: Path, tmp_path: Path, worker: SimpleNamespace
) -> None:
    """The benchmark's counts, with a router in the true run, where shapes depend on the batch alone."""
    report = tmp_path / "out.json"
    script = Path(__file__).resolve().parents[3] / "scripts" / "bench_prefill.py"
    options = [
        "--model",
        "demo-random",
        "--input-len",
        701,
        "--warmup",
        0,
        "--repeat",
        1,
        "--moe-dispatch",
        "all_gather",
    ]
    done = fork_ranks(WORLD, script, *options, "--json", report)
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    (true,) = result["results"]
    for rank in (0, 3):
        parallel = EmulatedConfig(emulate_world=WORLD, emulate_rank=rank, moe_dispatch="all_gather")
        engine = LLM("demo-random", device="cpu", parallel=parallel).engine
        emulated = measure_prefill(engine, random_prompt(engine, 701), warmup=0, repeat=1)
        assert emulated.bytes_sent == [true["bytes_sent"][rank]]
        assert emulated.attention_pairs == [true["attention_pairs"][rank]]
        assert emulated.imbalance == true["imbalance"]
        assert engine.bytes_read == result["weight_bytes_read"][rank]
