"""A vocabulary that ``tp_size`` does not divide: the last ranks' embedding and LM head end with padding, or are nothing
else, and no result shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine.demo.random_checkpoint import write_random_checkpoint

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "page_size": 8, "cache_memory": "8MiB"}
OPTIONS |= {"max_num_batched_tokens": 32, "progress": False}
DRAFTS = {"speculative_config": {"num_speculative_tokens": 2}}
SIZES = {"num_attention_heads": 12, "num_key_value_heads": 12, "index_topk": 16, "index_head_dim": 24}
SIZES |= {"index_n_heads": 12, "num_nextn_predict_layers": 1, "torch_dtype": "float32", "routed_scaling_factor": 2.5}
LENGTHS = (1, 15, 40, 100)


def requests(vocab: int) -> list[dict[str, Any]]:
    """Sampling parameters that padding would show in: its logits are 0, where others are negative."""
    common = {"max_tokens": 6, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 5}
    last, many = {vocab - 1: 3.0}, dict.fromkeys(range(vocab), -20.0)
    return [
        common | {"temperature": 0.0, "repetition_penalty": 1.2},
        common | {"temperature": 0.0, "logit_bias": many},
        common | {"temperature": 1.0, "top_k": vocab - 1, "seed": 1, "logit_bias": last},
        common | {"temperature": 1.5, "min_p": 0.001, "top_p": 0.99, "seed": 2, "logit_bias": many | last},
    ]


@pytest.fixture(scope="module")
def folders(base_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Path]]:
    """Models of a vocabulary: one with a head of its own, one with tied embeddings, and one whose MTP module has tables
    of its own."""

    def write(vocab: int) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp("vocabulary")
        keys = base_config | SIZES | {"model_type": "deepseek_v32", "vocab_size": vocab}
        for name in ("plain", "tied", "own tables"):
            write_random_checkpoint(folder / name, keys | {"tie_word_embeddings": name == "tied"}, fp8=False)
        tensors = load_file(folder / "own tables" / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith((".head.weight", ".embed_tokens.weight")) and ".layers." in name:
                tensor.copy_(tensor.flip(0))
        save_file(tensors, folder / "own tables" / "model.safetensors")
        return {name: folder / name for name in ("plain", "tied", "own tables")}

    return write


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 331), (4, 5)])
def test_results_are_those_of_one_rank(
    ranks: int, vocab: int, folders: Callable[[int], dict[str, Path]], rank_results: Callable[..., list[Any]],
    worker: SimpleNamespace, random_ids: Callable[..., list[int]], tmp_path: Path,
    assert_same_logits: Callable[..., None],
) -> None:  # fmt: skip
    names = ("plain", "tied", "own tables", "own tables, padded", "dummy")
    if ranks == 4:  # whose last two have nothing but padding; the model's head lies as the module's own
        names = ("tied", "own tables", "dummy")
    prompts, written = [random_ids(length, vocab) for length in LENGTHS], folders(vocab)
    described = [
        {
            "name": name,
            "folder": str(written.get(name.removesuffix(", padded"), written["plain"])),
            "parallel": {"tp_size": ranks},
            "options": OPTIONS | (DRAFTS if "own" in name else {"load_format": "dummy"} if name == "dummy" else {}),
            "padded": name.endswith("padded"),
            "prompts": prompts,
            "generate": [{"prompts": prompts, "params": requests(vocab)}],
        }
        for name in names
    ]
    results = rank_results(ranks, "worker.py", described, tmp_path)
    for case in described:
        one, name = worker.run_case(case | {"parallel": {}, "padded": False}), case["name"]
        for rank in results:
            got = rank[name]
            for every, every_1, last, last_1 in zip(got["all"], one["all"], got["last"], one["last"], strict=True):
                assert every.shape[1] == len(last) == vocab
                assert_same_logits(every, every_1, index_topk=16, what=name)
                assert_same_logits(last[None], last_1[None], what=name)
            assert got["tokens"] == one["tokens"], name
            assert got["pages_lost"] == got["own_pages_lost"] == 0
            assert all(map(torch.equal, got["all"], results[0][name]["all"])), "every rank returns the same"
            for theirs, ours in zip(one["logprobs"][0], got["logprobs"][0], strict=True):
                for by_token, wanted in zip(ours, theirs, strict=True):
                    assert by_token.keys() == wanted.keys() and max(by_token) < vocab
                    assert by_token == pytest.approx(wanted, abs=1e-3)
            for theirs, ours in zip(one["prompt_logprobs"][0], got["prompt_logprobs"][0], strict=True):
                assert ours[0] is theirs[0] is None
                for by_token, wanted in zip(ours[1:], theirs[1:], strict=True):
                    assert by_token.keys() == wanted.keys() and max(by_token) < vocab
