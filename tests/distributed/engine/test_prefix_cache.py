"""Conversations on 2 and 4 ranks, with pages of the prefix cache that lie on other ranks and in host memory, get the
tokens of a single process without a prefix cache.

While a request decodes, only its owner has the rows of its output. When the conversation goes on, the other ranks fetch
them. All cases of a world size run in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.demo.random_checkpoint import write_random_checkpoint

SIZES: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "vocab_size": 204,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "torch_dtype": "float32",
    "index_topk": 16,
    "index_head_dim": 24,
    "index_n_heads": 4,
    "routed_scaling_factor": 2.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one module": {"num_nextn_predict_layers": 1},
    "two modules": {"num_nextn_predict_layers": 2},
    "fp8": {"kv_lora_rank": 128, "index_head_dim": 64},
}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "top_k": 40, "seed": 5, "max_tokens": 12, "ignore_eos": True, "repetition_penalty": 1.2}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "page_size": 4, "progress": False}
LARGE, SMALL = {"cache_memory": "8MiB"}, {"cache_memory": "90KiB"}
DRAFTS = {"speculative_config": {"num_speculative_tokens": 2}}
HOST = {"host_cache_memory": "8MiB"}
MICRO_BATCHES = {"enable_dbo": True}


def case(model: str, name: str, parallel: dict[str, Any], **options: Any) -> dict[str, Any]:
    described = {"model": model, "name": f"{model} {name}", "parallel": parallel, "options": OPTIONS | options}
    # Then a request's rows take several steps, of which only the last computes tokens.
    return described | ({"max_fetched": 1} if "page by page" in name else {}) | {"padded": "padded" in name}


CASES = {
    2: [
        case("plain", "head-tail", {"cp_size": 2}, **LARGE),
        case("plain", "chunked", {"cp_size": 2}, **LARGE, max_num_batched_tokens=9),
        case("plain", "host memory, page by page", {"cp_size": 2}, **SMALL, **HOST),
        case("plain", "groups, host memory", {"cp_size": 1}, **SMALL, **HOST),
        case("plain", "disk", {"cp_size": 2}, **LARGE),
        case("plain", "micro-batches, host memory, page by page", {"cp_size": 2}, **SMALL, **HOST, **MICRO_BATCHES),
        case("one module", "host memory, page by page, padded", {"cp_size": 2}, **SMALL, **HOST, **DRAFTS),
        case("two modules", "head-tail, page by page", {"cp_size": 2}, **LARGE, **DRAFTS),
        case("fp8", "host memory", {"cp_size": 2}, **SMALL, **HOST, kv_cache_dtype="fp8"),
    ],
    4: [
        case("plain", "head-tail", {"cp_size": 4}, **LARGE),
        case("plain", "chunked", {"cp_size": 4}, **LARGE, max_num_batched_tokens=5),
        case("plain", "groups, host memory", {"cp_size": 2}, **HOST, cache_memory="56KiB"),
        case("one module", "host memory, padded", {"cp_size": 4}, **SMALL, **HOST, **DRAFTS),
        case("two modules", "groups", {"cp_size": 2}, **LARGE, **DRAFTS),
        case("fp8", "host memory", {"cp_size": 4}, **SMALL, **HOST, kv_cache_dtype="fp8"),
    ],
}


@pytest.fixture(scope="module")
def folders(base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name, keys in MODELS.items():
        made[name] = str(tmp_path_factory.mktemp("model"))
        write_random_checkpoint(made[name], base_config | SIZES | keys, fp8=False)
    return made


@pytest.fixture(scope="module")
def conversations(
    folders: dict[str, str], worker: SimpleNamespace, random_ids: Callable[..., list[int]]
) -> dict[str, list[dict[str, Any]]]:
    """By model: batches of prompts, each the continuation of the last, with the tokens of a single process."""
    made = {}
    for model, folder in folders.items():
        options = OPTIONS | LARGE | {"enable_prefix_caching": False}
        options |= DRAFTS if "module" in model else {"kv_cache_dtype": "fp8"} if model == "fp8" else {}
        document, batches = random_ids(61, seed=1), []
        prompts = [document, document[:30], [*document[:40], *random_ids(9, seed=2)], random_ids(37, seed=3)]
        for turn in range(3):
            params = [GREEDY, DRAWN, GREEDY, DRAWN | {"n": 2}] if turn < 2 else [GREEDY] * 4
            generate = [{"prompts": prompts, "params": params}]
            tokens = worker.run_case({"folder": folder, "options": options, "generate": generate})["tokens"]
            batches.append({"prompts": prompts, "params": params, "tokens": tokens[0]})
            prompts = [[*prompt, *said, 5 + turn] for prompt, said in zip(prompts, tokens[0], strict=True)]
        made[model] = batches
    return made


# Four ranks on two cores take a minute, and follow the same rules as two.
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_conversations(
    world: int,
    folders: dict[str, str],
    conversations: dict[str, list[dict[str, Any]]],
    rank_results: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    cases = [c | {"folder": folders[c["model"]], "generate": conversations[c["model"]]} for c in CASES[world]]
    for described in [one for one in cases if "disk" in one["name"]]:
        described["options"] = options = described["options"] | {"cache_folder": str(tmp_path / "pages")}
        with LLM(described["folder"], **options) as llm:  # one rank writes what several read
            llm.generate(described["generate"][0]["prompts"], SamplingParams(max_tokens=1), use_tqdm=False)
    ranks = rank_results(world, "worker.py", cases, tmp_path)
    for described in cases:
        results = [rank[described["name"]] for rank in ranks]
        first = results[0]
        sent = [result["fetched_bytes"] for result in results]
        print(
            described["name"], first["hits"], "tokens found", first["fetched"], "pages fetched", first["in_host"], sent
        )
        assert first["tokens"] == [batch["tokens"] for batch in conversations[described["model"]]]
        assert first["hits"] > 100
        assert (first["fetched"] > 0) == (described["parallel"]["cp_size"] > 1)
        assert (first["in_host"] > 0) == ("memory" in described["name"] or "disk" in described["name"])
        assert all((result["read"] > 0) == ("disk" in described["name"]) for result in results), "each reads its part"
        assert sum(sent) == first["fetched"] * first["page_bytes"], "only rows that a rank lacks travel, and each once"
        for other in results:
            assert other["pages_lost"] == 0 and other["own_pages_lost"] == 0
            assert all(other[key] == first[key] for key in ("tokens", "hits", "fetched", "in_host"))
