"""The whole engine with its Triton kernels in the interpreter: shows without a GPU how layers call kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.demo import demo_config
from dsa_engine.demo.random_checkpoint import write_random_checkpoint

# Prefill in chunks, then decode of a ragged batch in which one sequence selects and one is shorter than index_topk.
ENGINE = """
import json, sys, torch
from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.runtime.launch import INTERPRETED
assert INTERPRETED
folder, out, options = sys.argv[1:]
llm = LLM(folder, device="cpu", max_model_len=512, max_num_batched_tokens=96, page_size=16, cache_memory="4MiB",
          **json.loads(options))
long, short = torch.load(out + ".ids")
logits = llm.prompt_logits(long)
tokens = [o.token_ids for o in llm.generate([long, short], SamplingParams(temperature=0.0, max_tokens=4))]
torch.save((logits, tokens), out)
"""


def interpreted(folder: Path, long: list[int], short: list[int], out: Path, **options: Any) -> Any:
    """Logits of the long prompt, and tokens of both prompts."""
    torch.save((long, short), f"{out}.ids")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(folder), str(out), json.dumps(options)],
        capture_output=True, text=True, timeout=1200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "deepseek_v3"])
def test_the_engine_in_the_interpreter(
    model_type: str, oracle: Callable[..., Any], random_ids: Callable[..., list[int]],
    assert_same_logits: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    """Logits and greedy tokens equal those of transformers, with every operation a kernel."""
    model = oracle(model_type)
    long, short = random_ids(150), random_ids(20, seed=1)
    logits, tokens = interpreted(model.folder, long, short, tmp_path / "results.pt")
    assert_same_logits(logits, model.logits(long), index_topk=model.index_topk, what=model_type)
    assert tokens == [model.greedy(long, 4), model.greedy(short, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}], ids=["caches", "weights"])
def test_fp8_in_the_interpreter(
    options: dict[str, str], oracle: Callable[..., Any], random_ids: Callable[..., list[int]], tmp_path: Path
) -> None:
    """The tokens of the references, and their logits up to values that round to the next code; with FP8 weights
    products are dense and of experts."""
    long, short = random_ids(70 if "quantization" in options else 150), random_ids(20, seed=1)
    if "quantization" in options:
        folder, sizes = tmp_path / "model", {"num_hidden_layers": 2, "hidden_size": 160, "intermediate_size": 200}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "index_topk": 32, "index_n_heads": 12}
        sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        write_random_checkpoint(folder, demo_config() | sizes, fp8=True)
    else:
        folder = oracle("deepseek_v32", kv_lora_rank=128, index_head_dim=32).folder
    logits, tokens = interpreted(folder, long, short, tmp_path / "results.pt", **options)
    llm = LLM(folder, device="cpu", max_model_len=512, cache_memory="4MiB", progress=False, **options)
    wanted = llm.prompt_logits(long)
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-3
    outs = llm.generate([long, short], SamplingParams(temperature=0.0, max_tokens=4))
    assert tokens == [out.token_ids for out in outs]
