"""Decode in padded steps of static shape, as CUDA graphs replay them: the same tokens as without.

On a GPU the graphs are captured. Under ``TRITON_INTERPRET=1`` the same padded steps run kernel by kernel; the
references look at the batch on the host and cannot run them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.decode_graphs import DecodeGraphs, next_power_of_2
from dsa_engine.kernels.launch import INTERPRETED

CUDA = torch.cuda.is_available() and not INTERPRETED


def test_buckets() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 8, 9, 4097)] == [1, 2, 4, 4, 8, 8, 16, 8192]


@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs kernels: a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("model_type, ahead", [("deepseek_v32", False), ("deepseek_v32", True), ("deepseek_v3", True)])
def test_padded_steps(
    model_type: str, ahead: bool, oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """Three sequences in a bucket of four: one selects, one comes to it while it decodes, one sees few tokens."""
    model = oracle(model_type, num_hidden_layers=2)
    prompts = [random_ids(70), random_ids(62, seed=1), random_ids(3, seed=2)]
    llm = LLM(
        model.folder,
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        max_model_len=128,
        page_size=16,
        cache_memory="2MiB",
        enforce_eager=True,
    )
    engine = llm.engine
    engine.async_scheduling = ahead
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    steps, before = [], []

    class Counted(DecodeGraphs):
        def forward(self, step: Any, sampled: torch.Tensor | None) -> torch.Tensor:
            steps.append([plan.rows for plan in step.ranks])
            before.append(sampled is not None)
            return super().forward(step, sampled)

    engine.runner._graphs = Counted(
        engine.model, engine.cache, engine.config, engine.mesh, capture=CUDA, fewest_tokens=64
    )
    padded = [o.token_ids for o in llm.generate(prompts, params)]
    assert padded == [model.greedy(prompt, 5) for prompt in prompts]
    assert steps == [[3]] * 4  # the first token comes with the prefill
    # On a GPU the first of them is captured, and what is under way is read before.
    assert before == [ahead and not CUDA, ahead, ahead, ahead]
    if CUDA:
        assert engine.runner._graphs.captured == [(4, 128)] and engine.runner._graphs.memory_bytes > 0
