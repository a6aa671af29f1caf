"""The whole engine with its Triton kernels in the interpreter: how kernels are wired into layers, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Prefill in chunks, then decode of a ragged batch in which one sequence selects and one is shorter than index_topk.
ENGINE = """
import sys, torch
from dsa_engine import LLM, SamplingParams
from dsa_engine.kernels.launch import INTERPRETED
assert INTERPRETED
folder, out = sys.argv[1:]
llm = LLM(folder, device="cpu", max_model_len=512, max_num_batched_tokens=96, page_size=16, cache_memory="4MiB")
long, short = torch.load(out + ".ids")
logits = llm.prompt_logits(long)
tokens = [o.token_ids for o in llm.generate([long, short], SamplingParams(temperature=0.0, max_tokens=4))]
torch.save((logits, tokens), out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "deepseek_v3"])
def test_the_engine_in_the_interpreter(
    model_type: str, oracle: Callable[..., Any], random_ids: Callable[..., list[int]],
    assert_same_logits: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    """Logits and greedy tokens equal those of transformers, with every operation a kernel."""
    model = oracle(model_type)
    long, short = random_ids(150), random_ids(20, seed=1)
    out = tmp_path / "results.pt"
    torch.save((long, short), f"{out}.ids")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(model.folder), str(out)],
        capture_output=True, text=True, timeout=1200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    logits, tokens = torch.load(out)
    assert_same_logits(logits, model.logits(long), index_topk=model.index_topk, what=model_type)
    assert tokens == [model.greedy(long, 4), model.greedy(short, 4)]
