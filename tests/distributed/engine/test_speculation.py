"""Tokens with drafts equal those without drafts on 2 and 4 ranks, whatever is accepted and however work is divided.

Drafts are scripted: the length of a request says how many are right, so every number is accepted at some time. The
module's own drafts are recorded. At every length they must equal those of a single process that computes each prompt
in one step and accepts nothing; this shows that the module's caches are right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsa_engine.demo.random_checkpoint import write_random_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 203,  # which no tp_size divides
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
    "routed_scaling_factor": 2.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": SIZES | {"index_topk": 16, "index_head_dim": 24, "index_n_heads": 12},
    "glm_moe_dsa": SIZES
    | {"index_topk": 16, "index_head_dim": 24, "index_n_heads": 12, "indexer_types": ["full", "shared"]}
    | {"index_share_for_mtp_iteration": True},
    "deepseek_v3": SIZES,
}
# With several MTP modules, which draft one token each.
MODELS |= {f"{name} x3": keys | {"model_type": name, "num_nextn_predict_layers": 3} for name, keys in MODELS.items()}
LENGTHS = (1, 3, 15, 16, 17, 75, 40)  # prompts: shorter than index_topk, around it, beyond it
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 22, "ignore_eos": True}
# Penalties depend on the tokens before, drafts included.
PENALISED = GREEDY | {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "min_tokens": 20}
OPTIONS = {"device": "cpu", "max_model_len": 128, "page_size": 4, "cache_memory": "4MiB", "progress": False}


def case(model: str, drafts: int, name: str, parallel: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    options = OPTIONS | options | {"speculative_config": {"num_speculative_tokens": drafts}}
    described = {"name": f"{model} {drafts} {name}", "model": model, "parallel": parallel or {}, "options": options}
    return described | {key: key in name for key in ("padded", "ahead")} | {"preempts": "preempted" in name}


def divided(cp: int, tp: int, dispatch: str) -> dict[str, Any]:
    return {"cp_size": cp, "tp_size": tp, "moe_dispatch": dispatch, "decode_dispatch": dispatch}


CHUNKED = {"max_num_batched_tokens": 7, "max_prefill_share": 1.0}
SHARED = {"max_num_batched_tokens": 16}
MICRO_BATCHES = {"enable_dbo": True}
MOVING = divided(2, 1, "all_gather") | {"redundant_experts": 2, "rebalance_every": 2}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        case("deepseek_v32", 3, "tp2 all_to_all", divided(2, 2, "all_to_all")),
        case("deepseek_v32", 1, "chunked", divided(2, 1, "all_gather"), **CHUNKED),
        case("deepseek_v32", 2, "preempted", divided(2, 1, "all_to_all"), **SHARED),
        case("deepseek_v32", 2, "chunked, micro-batches", divided(2, 1, "all_to_all"), **CHUNKED, **MICRO_BATCHES),
        case("deepseek_v32", 1, "padded, micro-batches, experts move", MOVING, **MICRO_BATCHES),
        case("deepseek_v32", 3, "groups, preempted", divided(1, 2, "all_gather"), **SHARED),
        case("deepseek_v32", 2, "padded, preempted", divided(2, 2, "all_gather"), **SHARED),
        # The module's own drafts, which are seldom right: the host learns of them too late to script them.
        case("deepseek_v32", 3, "padded, ahead, preempted, experts move", MOVING, **SHARED),
        case("glm_moe_dsa", 3, "chunked", divided(2, 2, "all_to_all"), **CHUNKED),
        case("deepseek_v3", 3, "groups", divided(1, 1, "all_to_all")),
        case("deepseek_v32 x3", 3, "tp2", divided(2, 2, "all_to_all")),
        case("deepseek_v32 x3", 3, "chunked, preempted", divided(2, 1, "all_gather"), **CHUNKED),
        case("deepseek_v3 x3", 2, "tp2, chunked", divided(2, 2, "all_to_all"), **CHUNKED),
    ],
    4: [
        case("deepseek_v32", 3, "tp2", divided(4, 2, "all_gather")),
        case("deepseek_v32", 3, "by node, preempted", divided(4, 1, "by_node"), **SHARED) | {"nodes": [0, 0, 1, 1]},
        case("deepseek_v32", 7, "groups, preempted", divided(2, 1, "all_gather"), **SHARED),
        case("deepseek_v32 x3", 3, "chunked", divided(4, 2, "all_to_all"), **CHUNKED),
        case("glm_moe_dsa x3", 3, "groups, preempted", divided(2, 1, "all_gather"), **SHARED),
        case("deepseek_v3 x3", 3, "tp4", divided(4, 4, "all_gather")),
    ],
}


class Wanted:
    """The worker's case for a model, and its expected results."""

    def __init__(
        self, folder: Path, model: str, generate: dict[str, Any], worker: SimpleNamespace, base: dict[str, Any]
    ):
        config = base | {"model_type": model} | MODELS[model]
        write_random_checkpoint(folder, config, fp8=False)
        if model == "deepseek_v3 x3":  # its modules have other embeddings and heads than the model
            tensors = load_file(folder / "model.safetensors")
            for name, tensor in tensors.items():
                if name.endswith((".head.weight", ".embed_tokens.weight")) and ".layers." in name:
                    tensor.copy_(tensor.flip(0))
            save_file(tensors, folder / "model.safetensors")
        self.of_all: dict[str, Any] = {"folder": str(folder), "generate": [generate]}
        plain = worker.run_case(self.of_all | {"options": OPTIONS})
        self.tokens: list[list[int]] = plain["tokens"][0]
        self.of_all["script"] = self.tokens
        none_right = [[] for _ in self.tokens]
        modules = config["num_nextn_predict_layers"]
        longest = case(model, 7 if modules == 1 else modules, "wrong") | self.of_all | {"script": none_right}
        actual = worker.run_case(longest)
        assert actual["tokens"][0] == self.tokens
        self.drafts = {key: drafts for key, (_, drafts) in actual["drafts"].items()}


@pytest.fixture(scope="module")
def wanted(
    worker: SimpleNamespace, random_ids: Callable[..., list[int]], base_config: dict[str, Any], tmp_path_factory: Any
) -> Callable[[str], Wanted]:
    made: dict[str, Wanted] = {}
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    params = [(GREEDY, SAMPLED | {"seed": i}, PENALISED)[i % 3] for i in range(len(prompts))]
    # Penalties count the drafts that a row sees.
    params[0] = params[0] | {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    params[1] = params[1] | {"presence_penalty": 0.7}

    def get(model: str) -> Wanted:
        if model not in made:
            folder = tmp_path_factory.mktemp("mtp") / model
            made[model] = Wanted(folder, model, {"prompts": prompts, "params": params}, worker, base_config)
        return made[model]

    return get


def test_relaxed_acceptance(
    rank_results: Callable[..., list[Any]],
    worker: SimpleNamespace,
    random_ids: Callable[..., list[int]],
    base_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Padded steps on 2 ranks, launched ahead, give the tokens of eager steps of one process; thinking begins and ends
    anywhere, as there are few tokens."""
    config = base_config | MODELS["deepseek_v32"] | {"model_type": "deepseek_v32", "vocab_size": 16}
    write_random_checkpoint(tmp_path / "model", config, fp8=False)
    thinking = {"relaxed_delta": 0.2, "begin_thinking_token": 8, "end_thinking_token": 9}
    prompts = [[*random_ids(length, 8, seed=length), 8] for length in LENGTHS]
    drawn = [GREEDY | {"temperature": 1.5, "seed": seed} for seed in range(4)]
    params = [GREEDY, GREEDY | {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, *drawn, GREEDY]
    generate = [{"prompts": prompts, "params": params}]
    cases = [
        case("deepseek_v32", 3, name, parallel) | {"folder": str(tmp_path / "model"), "generate": generate}
        for name, parallel in (
            ("padded", divided(2, 1, "all_gather")),
            ("padded, ahead", divided(1, 1, "all_gather")),
            ("padded, ahead, tp2", divided(2, 2, "all_gather")),
            ("eager", divided(2, 1, "all_to_all")),
        )
    ]
    tokens = []
    for topk in (0, 3):
        for one in cases:
            one["options"]["speculative_config"] |= thinking | {"relaxed_topk": topk}
        tokens.append(worker.run_case(cases[-1] | {"parallel": {}})["tokens"])
    assert tokens[0] != tokens[1]
    for rank in rank_results(2, "worker.py", cases, tmp_path):
        for name, actual in rank.items():
            assert actual["tokens"] == tokens[1], name
            assert (actual["launched_ahead"] > 3) == ("ahead" in name), name


@pytest.mark.parametrize("world", [pytest.param(w, marks=[pytest.mark.slow] * (w != 2)) for w in CASES])
def test_the_same_tokens(
    world: int,
    wanted: Callable[[str], Wanted],
    rank_results: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    cases = [described | wanted(described["model"]).of_all for described in CASES[world]]
    for described in cases:
        if described["ahead"]:
            del described["script"]
    ranks = rank_results(world, "worker.py", cases, tmp_path)
    for described in cases:
        name, expected = described["name"], wanted(described["model"])
        count = described["options"]["speculative_config"]["num_speculative_tokens"]
        actual = ranks[0][name]
        assert actual["tokens"][0] == expected.tokens, name
        assert (actual["moved_bytes"] > 0) == ("experts move" in name)
        if described["ahead"]:
            assert actual["launched_ahead"] > 3 and actual["preemptions"] == 3, name
            continue
        accepted = {number for number, _ in actual["drafts"].values()}
        assert accepted >= {0, count} and len(accepted) > count // 2, name
        assert len(actual["drafts"]) >= 20
        for key, (_, drafts) in actual["drafts"].items():
            assert drafts[:count] == expected.drafts[key][:count], (name, key)
        assert actual["preemptions"] == 3 * described["preempts"], name
        for other in (rank[name] for rank in ranks):
            assert all(other[key] == actual[key] for key in ("tokens", "drafts", "preemptions"))
            assert other["pages_lost"] == 0 and other["own_pages_lost"] == 0
