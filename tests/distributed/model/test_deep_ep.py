"""DeepEP's dispatches on 2 ranks give the tokens of an all-to-all, in prefill and decode; a stub goes over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsa_engine.kernels.runtime import cpu
from dsa_engine.weights.convert import quantize_checkpoint

OPTIONS = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 512, "cache_memory": "64MiB"}
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
LENGTHS = (3, 40, 130, 17)
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "micro-batches": {"enable_dbo": True}, "INT8": {}}
KINDS["FP8"] = {"quantization": "fp8"}
if cpu.library() is not None:  # else a CPU refuses it
    KINDS |= dict.fromkeys(("batch-invariant", "batch-invariant, in rounds"), {"batch_invariant": True})
# Codes and scales travel in prefill only.
PARALLEL: dict[str, dict[str, Any]] = {"FP8": {"decode_dispatch": "all_gather"}}
PARALLEL["batch-invariant, in rounds"] = {"moe_chunk_size": 50}
LIBRARY = {"moe_dispatch": "deep_ep", "decode_dispatch": "deep_ep"}
NORMAL, LOW_LATENCY = {"get_dispatch_layout", "dispatch", "combine"}, {"low_latency_dispatch", "low_latency_combine"}


def test_tokens_are_those_of_an_all_to_all(
    oracle: Callable[..., Any],
    rank_results: Callable[..., list[Any]],
    random_ids: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    """With batch_invariant each pair of a token and an expert travels by itself, and no sum is rounded elsewhere: all
    bits are the same. Without it the low-latency mode rounds the result of an expert, and an all-to-all the sum of a
    rank's; the normal mode keeps all bits of 2 ranks."""
    folder = oracle("deepseek_v32", hidden_size=2048, num_hidden_layers=2).folder
    stored = {kind: tmp_path / kind for kind in ("INT8", "FP8")}  # DeepEP takes no codes of INT8
    for kind, quantized in stored.items():
        quantize_checkpoint(folder, quantized, kind.lower())
    prompts = [random_ids(length) for length in LENGTHS]
    both = {"all_to_all": {"moe_dispatch": "all_to_all", "decode_dispatch": "all_to_all"}, "deep_ep": LIBRARY}
    cases = [
        {
            "name": f"{dispatch} {kind}",
            "folder": str(stored.get(kind, folder)),
            "parallel": config | PARALLEL.get(kind, {}),
            "options": OPTIONS | options,
            "prompts": prompts,
            "generate": [{"prompts": prompts, "params": [GREEDY | {"logprobs": 1}] * len(prompts)}],
        }
        for dispatch, config in both.items()
        for kind, options in KINDS.items()
    ]
    for rank in rank_results(2, "deep_ep_worker.py", cases, tmp_path):
        for kind in KINDS:
            theirs, ours = rank[f"deep_ep {kind}"], rank[f"all_to_all {kind}"]
            wanted = NORMAL | {"__init__"} if kind == "FP8" else NORMAL | LOW_LATENCY | {"__init__"}
            assert not ours["calls"] and theirs["calls"].keys() == wanted
            for a, b in zip(theirs["all"], ours["all"], strict=True):
                assert torch.equal(a, b), kind
            assert theirs["tokens"] == ours["tokens"], kind
            if "invariant" in kind:
                assert theirs["logprobs"] == ours["logprobs"]
