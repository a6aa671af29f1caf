"""Random requests get the tokens of one process with room for all of them, on 1 to 4 ranks whose devices have room for
one or two: pages spill, and decode reads what it selects there. With drafts, prefix hits, preemption, aborts, FP8
caches, host memory and the disk, contexts on several ranks, padded steps and steps launched ahead."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.demo import demo_folder, trained_folder
from dsa_engine.engine.cache.sizes import HotBytes
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.kv_cache import cache_dtype, cache_format

pytestmark = pytest.mark.slow
TOPK, PAGE, SEQS = 16, 8, 8
OPTIONS = {"device": "cpu", "max_model_len": 400, "page_size": PAGE, "progress": False, "max_num_seqs": SEQS}
OPTIONS |= {"max_num_batched_tokens": 96, "cache_memory": "64MiB"}
RESIDENT, SPILLED, HOST = 28, 130, 15  # pages of a rank, about
BATCH, BATCHES = 16, 8


def case(
    name: str, world: int, cp: int = 1, tp: int = 1, dcp: int = 1, drafts: int = 0, dispatch: str = "all_gather"
) -> dict[str, Any]:
    """The words of the name say what happens."""
    overrides: dict[str, Any] = {"index_topk": TOPK}
    options: dict[str, Any] = OPTIONS | {"hf_overrides": overrides}
    if fp8 := "fp8" in name:
        overrides |= {"kv_lora_rank": 128, "qk_rope_head_dim": 16}
        options |= {"kv_cache_dtype": "fp8", "load_format": "dummy"}
    config, modules = ModelConfig.from_pretrained(demo_folder() if fp8 else trained_folder(), overrides), 0
    if drafts:
        options["speculative_config"] = {"num_speculative_tokens": drafts}
        modules = SpeculativeConfig(num_speculative_tokens=drafts).modules(config.num_nextn_predict_layers)
    if "invariant" in name:
        options["batch_invariant"] = True
    hot = TOPK * max(1 + drafts, 2 * drafts) * (2 if "more" in name else 1)
    format = cache_format(config, cache_dtype("fp8" if fp8 else "auto", torch.float32))
    of = HotBytes.of(config.with_mtp(modules), format, PAGE, cdiv(SEQS * dcp, world), hot)
    small = {"hot_rows": hot, "cache_memory": of.rows + RESIDENT * of.page + SPILLED * of.keys}
    small |= {"host_cache_memory": SPILLED * of.latent + HOST * of.page, "enforce_eager": "eager" in name}
    parallel = {"cp_size": cp, "tp_size": tp, "dcp_size": dcp, "moe_dispatch": dispatch, "decode_dispatch": dispatch}
    described = {"name": name, "folder": "demo-random" if fp8 else "demo", "options": options, "small": small}
    described |= {"parallel": parallel, "preempts": "preempted" in name}
    described |= {key: key in name for key in ("padded", "ahead", "adaptive")}
    return described | ({"every": 3, "aborts": 20} if "aborts" in name else {})


# By number of ranks. Those of FP8 caches on several ranks are invariant: codes follow the rounding of a prompt's cuts.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "recorded, preempted"},
        {"name": "padded, ahead, adaptive, more", "drafts": 2},
        {"name": "eager, fp8, disk, aborts", "drafts": 1},
        {"name": "invariant, ahead, disk"},
    ],
    2: [
        {"name": "dcp 2, disk, preempted", "cp": 2, "dcp": 2},
        {"name": "cp 2, padded, ahead, fp8, invariant", "cp": 2, "drafts": 2},
        {"name": "groups, aborts, more", "dispatch": "all_to_all"},
    ],
    3: [{"name": "cp 3, padded, ahead, adaptive", "cp": 3, "drafts": 3}],
    4: [
        {"name": "cp 4, dcp 2, preempted", "cp": 4, "dcp": 2, "drafts": 1},
        {"name": "cp 2, tp 2, dcp 2, ahead, padded, disk", "cp": 2, "tp": 2, "dcp": 2},
    ],
}


def random_requests(seed: int) -> list[dict[str, Any]]:
    rng, generate = random.Random(seed), []
    documents = [[rng.randrange(4, 200) for _ in range(200)] for _ in range(3)]
    for _ in range(BATCHES):
        beginnings = [rng.choice(documents)[: rng.choice([0, 0, 60, 200])] for _ in range(BATCH)]
        prompts = [begins + [rng.randrange(4, 200) for _ in range(rng.randint(1, 130))] for begins in beginnings]
        params = [
            {"temperature": rng.choice([0.0, 0.0, 0.9]), "seed": rng.randrange(99), "max_tokens": rng.randint(1, 50)}
            for _ in range(BATCH)
        ]
        generate.append({"prompts": prompts, "params": [one | {"ignore_eos": True} for one in params]})
    return generate


@pytest.mark.parametrize("world", CASES)
def test_the_same_tokens(
    world: int, rank_results: Callable[..., list[Any]], worker: SimpleNamespace, tmp_path: Path
) -> None:
    made, cases = [case(world=world, **one) for one in CASES[world]], []
    for number, one in enumerate(made):
        folder = {"cache_folder": str(tmp_path / f"pages{number}")} if "disk" in one["name"] else {}
        options = one["options"] | one["small"] | folder
        cases.append(one | {"generate": random_requests(10 * world + number), "options": options})
    if world == 1:
        ranks = [{one["name"]: worker.run_case(one) for one in cases}]
    else:
        ranks = rank_results(world, "worker.py", cases, tmp_path, timeout=900)
    for one, described in zip(cases, made, strict=True):
        plain = {"name": one["name"], "folder": one["folder"], "generate": one["generate"]}
        expected = worker.run_case(plain | {"options": described["options"]})
        for actual in (rank[one["name"]] for rank in ranks):
            spilled, preempted = actual["spilled"], actual["preemptions"]
            print(
                world, one["name"], f"{spilled} pages spilled, {preempted} preemptions, {actual['hits']} tokens found"
            )
            assert spilled > 50 and actual["pages_lost"] == 0 and actual["hits"] > 500, one["name"]
            for name in ("tokens", "ends"):
                both = zip(sum(actual[name], []), sum(expected[name], []), sum(actual["ends"], []), strict=True)
                for got, wanted, (reason, _) in both:
                    assert reason == "abort" or got == wanted, one["name"]
                    assert name == "ends" or got == wanted[: len(got)], one["name"]
