"""Weights so large that logits are not finite: each call gets an error; see also test_request_life.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.calls.jobs import prefill

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "cache_memory": "8MiB", "progress": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NOT_FINITE = "the model's logits for its next token are not finite (inf or nan)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_lm_head(
    dtype: str, oracle: Callable[..., Any], tmp_path: Path, random_ids: Callable[..., list[int]]
) -> None:
    source, prompt = oracle("deepseek_v32", **SIZES).folder, random_ids(62)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"].flatten()[:6] = 3e38
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    llm = LLM(tmp_path, **OPTIONS, dtype=dtype)
    (ended,) = llm.generate([prompt], GREEDY)
    assert (ended.finish_reason, ended.error, ended.token_ids) == ("error", NOT_FINITE, [])
    with pytest.raises(ValueError, match=r"logits at position \d+ of the prompt are not finite \(inf or nan\)"):
        llm.prompt_logits(prompt)
    with pytest.raises(ValueError, match="logits after the prompt are not finite"):
        prefill(llm.engine, prompt)
