"""Ranks that hold contexts together (``dcp_size``) choose the tokens that one process chooses: on 2 to 4 ranks, in
groups of any size, in chunks, with hits, preemption, aborts, drafts, FP8 caches, host memory and the disk,
micro-batches, experts that move, dispatches by node and every kind of model; no page is lost, and requests run that are
longer than the cache of a rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from small_config import SMALL

FOUR_HEADS = SMALL | {"vocab_size": 204, "num_attention_heads": 4}
FP8_SIZES = {"kv_lora_rank": 128, "index_head_dim": 128, "qk_rope_head_dim": 16}
SHARED = {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full", "shared"]}
MODELS: dict[str, dict[str, Any]] = {
    "v32": {},
    "fp8": FP8_SIZES,
    "v3": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
    "glm": SHARED | {"num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True},
    "two modules": {"num_nextn_predict_layers": 2},
}
DRAFTS = ("demo", "glm", "v3", "two modules")
COUNTS = ("hits", "fetched", "in_host", "written", "read", "preemptions", "launched_ahead", "moved_bytes")
OPTIONS = {"device": "cpu", "max_model_len": 512, "page_size": 8, "cache_memory": "4MiB", "progress": False}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    where = {"demo": "demo"}
    for name, keys in MODELS.items():
        where[name] = str(folder := tmp_path_factory.mktemp("models") / name)
        write_random_checkpoint(folder, FOUR_HEADS | keys, fp8=False)
    return where


def random_work(rng: random.Random) -> dict[str, Any]:
    """What is computed: the model without its folder, options that change rows and tokens, and requests."""
    model, options = rng.choice(["demo", *MODELS]), OPTIONS | {"page_size": rng.choice([4, 8, 16])}
    if model == "fp8":
        options["kv_cache_dtype"] = "fp8"
    if model in DRAFTS and rng.random() < 0.8:
        options["speculative_config"] = {
            "num_speculative_tokens": 2 if model == "two modules" else rng.choice([1, 2, 3])
        }
    prefix, lengths = rng.randrange(100), [rng.choice([1, 7, 40, 100, 200]) for _ in range(rng.randrange(3, 9))]
    shared = [rng.randrange(4, 200) for _ in range(prefix)]
    prompts = [
        shared * (rng.random() < 0.6) + [rng.randrange(4, 200) for _ in range(rng.randrange(length, 2 * length))]
        for length in lengths
    ]
    params = [
        {"temperature": rng.choice([0.0, 0.9]), "max_tokens": rng.randrange(1, 20), "seed": n, "ignore_eos": True}
        for n in range(len(prompts))
    ]
    again = [prompt + [rng.randrange(4, 200)] for prompt in prompts[:3]]
    if model != "v3" and rng.random() < 0.2:
        params[0]["selection"] = 2
    rounds = [{"prompts": prompts, "params": params}, {"prompts": again, "params": params[:3]}]
    return {"model": model, "options": options, "generate": rounds}


def random_case(rng: random.Random, world: int, name: str, work: dict[str, Any], least: int = 2) -> dict[str, Any]:
    """A case of ``worker.py``, without the folder of its ``model``: how some work is computed, with ``dcp_size`` not
    less than ``least``."""
    cp = rng.choice([size for size in (2, 3, 4) if world % size == 0])
    dcp = rng.choice([size for size in range(least, 5) if cp % size == 0])
    tp = rng.choice([size for size in (1, 1, 2, 4) if world % size == 0])
    dispatch = rng.choice(["all_to_all", "by_node", "all_gather", "all_gather"])
    parallel = {"cp_size": cp, "dcp_size": dcp, "tp_size": tp, "moe_dispatch": dispatch, "decode_dispatch": dispatch}
    options = work["options"] | {"max_num_batched_tokens": rng.choice([16, 40, 300])}
    options |= {"enable_dbo": rng.random() < 0.3, "max_num_seqs": rng.choice([3, 16])}
    case: dict[str, Any] = work | {"name": name, "parallel": parallel, "options": options}
    if dispatch == "by_node":
        case["nodes"] = rng.choice([[0, 0, 1, 1], [0, 1, 0, 1]])[:world]
    if rng.random() < 0.3:
        parallel |= {"redundant_experts": rng.choice([0, 2, 4]), "rebalance_every": 2}
    if rng.random() < 0.4:
        # Little more than the longest request needs on all ranks of its group.
        pages = -(-max(len(p) + 20 for p in work["generate"][0]["prompts"]) // options["page_size"])
        case["pages"] = -(-(pages + rng.choice([2, 20])) // dcp)
    if rng.random() < 0.3:
        options["host_cache_memory"] = rng.choice(["128KiB", "1MiB"])
    if dispatch == "all_gather":
        case["padded"], case["ahead"] = rng.random() < 0.5, rng.random() < 0.5
    case["preempts"], case["waiting"] = rng.random() < 0.4, options["enable_dbo"] and rng.random() < 0.3
    if rng.random() < 0.3:
        case |= {"every": rng.choice([1, 2, 4]), "aborts": rng.choice([0, 1, 3])}
    if "speculative_config" in options and rng.random() < 0.3:
        case["adaptive"] = True
    return case


def random_cases(rng: random.Random, world: int, number: int, folder: Path) -> list[dict[str, Any]]:
    """Some work is computed twice, each time in another way and perhaps without ``dcp_size``: pages that the first
    engine leaves on the disk are read by the second one."""
    cases = list[dict[str, Any]]()
    while len(cases) < number:
        work, name = random_work(rng), f"{world}-{len(cases)}"
        if len(cases) % 5:
            cases.append(random_case(rng, world, name, work))
            continue
        size = rng.choice([None, None, None, "1MiB"])  # more pages than that are deleted
        work["options"] |= {"cache_folder": str(folder / name), "cache_folder_size": size}
        cases += [random_case(rng, world, f"{name}{how}", work, least=1) for how in (" writes", " reads")]
    return cases


def check(cases: list[dict[str, Any]], world: int, rank_results: Any, worker: Any, folder: Path) -> list[Any]:
    """Compares the tokens, and the selections of the first rank; returns the results of the ranks."""
    ranks = rank_results(world, "worker.py", cases, folder)
    for case in cases:
        plain = {"name": case["name"], "folder": case["folder"], "generate": case["generate"]}
        same_options = ("kv_cache_dtype", "page_size")
        plain["options"] = OPTIONS | {key: case["options"][key] for key in same_options if key in case["options"]}
        expected = worker.run_case(plain)
        for actual in (rank[case["name"]] for rank in ranks):
            assert actual["pages_lost"] == 0, case
            for ours, theirs in zip(actual["tokens"], expected["tokens"], strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert list(one) == list(other)[: len(one) if case.get("aborts") else None], case
        both = ranks[0][case["name"]]["selections"], expected["selections"]
        for (positions, weights), (others, theirs) in [] if case.get("aborts") else zip(*both, strict=True):
            assert torch.equal(positions, others), case
            torch.testing.assert_close(weights, theirs, rtol=1e-3, atol=1e-4)
    return ranks


def few_cases() -> list[dict[str, Any]]:
    """With chunks, hits, shared selections, drafts launched ahead, preemption, FP8 caches, micro-batches, and a request
    that is longer than the cache of a rank."""
    rng = random.Random(1)
    shared, *others = ([rng.randrange(4, 200) for _ in range(count)] for count in (60, 30, 170, 9, 50))
    prompts = [shared + others[0], others[1], others[2], shared + others[3]]
    greedy, drawn = ({"temperature": t, "max_tokens": 12, "seed": 7, "ignore_eos": True} for t in (0.0, 0.9))
    rounds = [{"prompts": prompts, "params": [greedy, drawn | {"selection": 2}, greedy, drawn]}]
    rounds += [{"prompts": prompts[1::-1], "params": [greedy, drawn]}]
    chunks = OPTIONS | {"max_num_batched_tokens": 40}
    groups = {"cp_size": 2, "dcp_size": 2}
    static = {"parallel": groups | {"moe_dispatch": "all_gather", "decode_dispatch": "all_gather", "tp_size": 2}}
    drafts = {"options": chunks | {"speculative_config": {"num_speculative_tokens": 2}}}
    kinds: list[dict[str, Any]] = [
        {"model": "glm", "padded": True, "ahead": True, "pages": 15} | static | drafts,
        {"model": "fp8", "preempts": True, "options": chunks | {"kv_cache_dtype": "fp8", "enable_dbo": True}},
    ]
    return [{"name": kind["model"], "parallel": groups, "generate": rounds} | kind for kind in kinds]


def test_a_few_cases(
    rank_results: Callable[..., list[Any]], worker: SimpleNamespace, folders: dict[str, str], tmp_path: Path
) -> None:
    cases = [case | {"folder": folders[case["model"]]} for case in few_cases()]
    ranks = check(cases, 2, rank_results, worker, tmp_path)
    longest = max(len(prompt) for prompt in cases[0]["generate"][0]["prompts"])
    assert longest > 8 * cases[0]["pages"], "no rank holds it alone"
    assert ranks[0]["glm"]["launched_ahead"] and ranks[0]["fp8"]["preemptions"] == 3
    assert all(rank["glm"]["hits"] > 60 for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_cases(
    world: int,
    seed: int,
    rank_results: Callable[..., list[Any]],
    worker: SimpleNamespace,
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    """15 launches of 14 cases."""
    cases = random_cases(random.Random(10 * world + seed), world, 14, tmp_path / "pages")
    cases = [case | {"folder": folders[case["model"]]} for case in cases]
    ranks = check(cases, world, rank_results, worker, tmp_path)
    for case in cases:
        counts = {key: [rank[case["name"]][key] for rank in ranks] for key in COUNTS}
        print(case["name"], case["model"], case["parallel"], counts)
    for reads in [case["name"] for case in cases if "reads" in case["name"]]:
        written = sum(rank[reads.replace("reads", "writes")]["written"] for rank in ranks)
        read, hits = sum(rank[reads]["read"] for rank in ranks), ranks[0][reads]["hits"]
        assert written > 0 and read > 0 and hits > 0, reads


@pytest.mark.slow
def test_400_000_tokens(rank_results: Callable[..., list[Any]], worker: SimpleNamespace, tmp_path: Path) -> None:
    """A narrow layer on two ranks, in the last pages of caches of more than 2³¹ bytes: the selection and tokens of one
    process."""
    keys = {"num_hidden_layers": 1, "num_attention_heads": 2, "index_n_heads": 4, "max_position_embeddings": 1 << 20}
    write_random_checkpoint(folder := tmp_path / "model", SMALL | {"vocab_size": 204} | keys, fp8=False)
    rng = random.Random(0)
    params = {"temperature": 0.0, "max_tokens": 3, "selection": 3, "ignore_eos": True}
    rounds = [{"prompts": [[rng.randrange(4, 200) for _ in range(400_000)]], "params": [params]}]
    options = {"device": "cpu", "max_model_len": 400_064, "cache_memory": "1GiB", "max_num_seqs": 1, "progress": False}
    plain = {"name": "long", "folder": str(folder), "options": options, "generate": rounds}
    case = plain | {"parallel": {"cp_size": 2, "dcp_size": 2}, "pages": 400_000, "last_pages": True}
    ranks, one = rank_results(2, "worker.py", [case], tmp_path, timeout=900), worker.run_case(plain)
    for rank in (each["long"] for each in ranks):
        assert rank["latent_bytes"] > 1 << 31 and rank["pages_lost"] == 0
        assert [list(tokens) for tokens in rank["tokens"][0]] == [list(tokens) for tokens in one["tokens"][0]]
    (positions, weights), (others, theirs) = ranks[0]["long"]["selections"][0], one["selections"][0]
    assert torch.equal(positions, others) and int(positions.max()) > 350_000
    torch.testing.assert_close(weights, theirs, rtol=1e-3, atol=1e-4)
