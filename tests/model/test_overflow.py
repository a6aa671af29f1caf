"""Index scores and logits that are not finite: the request ends with an error, others are not touched."""

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


@pytest.fixture(scope="module")
def source(oracle: Callable[..., Any]) -> Path:
    return oracle("deepseek_v32", **SIZES).folder


def with_huge(source: Path, folder: Path, name: str, value: float = 3e38) -> Path:
    """A copy of the checkpoint with six huge numbers in one tensor."""
    tensors = load_file(source / "model.safetensors")
    tensors[name].flatten()[:6] = value
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize(
    "name, layer, dtype",
    [
        ("weights_proj.weight", 0, "float32"),
        ("weights_proj.weight", 1, "bfloat16"),
        ("wq_b.weight", 1, "float32"),
        ("wk.weight", 1, "float32"),
        ("k_norm.weight", 1, "float32"),
        ("k_norm.bias", 1, "bfloat16"),
    ],
)
def test_index_scores(
    name: str, layer: int, dtype: str, source: Path, tmp_path: Path, random_ids: Callable[..., list[int]]
) -> None:
    """Requests that see more tokens than are selected end, in prefill or in decode; shorter ones select nothing."""
    folder = with_huge(source, tmp_path, f"model.layers.{layer}.self_attn.indexer.{name}")
    options = OPTIONS | {"dtype": dtype}
    prompts = [random_ids(length) for length in (20, 100, 62)]
    fine = LLM(source, **options).generate(prompts, GREEDY)
    llm = LLM(folder, **options)
    short, long, growing = llm.generate(prompts, GREEDY)
    assert (short.finish_reason, short.token_ids) == ("length", fine[0].token_ids)
    assert (long.finish_reason, long.error, long.token_ids) == ("error", NOT_FINITE, [])
    assert (growing.finish_reason, growing.error) == ("error", NOT_FINITE)
    assert growing.token_ids == fine[2].token_ids[:3]  # the fourth would be chosen by a selection
    with pytest.raises(ValueError, match=r"logits at position 6\d of the prompt are not finite \(inf or nan\)"):
        llm.prompt_logits(prompts[1])
    with pytest.raises(ValueError, match="logits after the prompt are not finite"):
        prefill(llm.engine, prompts[1])
    assert bool(llm.prompt_logits(prompts[0]).isfinite().all())
    assert [out.token_ids for out in llm.generate(prompts[:1], GREEDY)] == [fine[0].token_ids]
