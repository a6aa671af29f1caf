"""Decode steps of an emulated rank, padded as CUDA graphs replay them: its experts serve the same pairs as without.

Like tests/engine/test_decode_graphs.py it needs kernels: a GPU, or ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.kernels.launch import INTERPRETED
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.expert_parallel import EmulatedExpertParallel
from dsa_engine.measure.emulation.mesh import follow_steps
from dsa_engine.parallel.expert import Dispatched

CUDA = torch.cuda.is_available() and not INTERPRETED


@pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs kernels: a GPU, or TRITON_INTERPRET=1")
def test_padding_is_served_by_nobody(
    oracle: Callable[..., Any], random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end one after the other, so that the ranks' tokens change within one padded size."""
    folder = oracle("deepseek_v32", num_hidden_layers=2).folder
    served: list[list[int]] = []
    dispatch = EmulatedExpertParallel.dispatch

    def noted(self: EmulatedExpertParallel, *arguments: Any) -> Dispatched:
        here = dispatch(self, *arguments)
        served.append(here.experts[here.experts >= 0].flatten().long().bincount(minlength=4).tolist())
        return here

    monkeypatch.setattr(EmulatedExpertParallel, "dispatch", noted)
    prompts = [random_ids(3 + i, seed=i) for i in range(7)]
    params = [SamplingParams(temperature=0.0, max_tokens=2 + i % 4, ignore_eos=True) for i in range(7)]
    found = []
    for padded in (False, True):
        llm = LLM(
            folder,
            device="cuda" if CUDA else "cpu",
            dtype="float32",
            max_model_len=128,
            page_size=16,
            cache_memory="2MiB",
            enforce_eager=True,
            parallel=EmulatedConfig(emulate_world=3, emulate_rank=1),
        )
        engine = llm.engine
        follow_steps(engine)
        if padded:
            engine.runner._graphs = DecodeGraphs(
                engine.model, engine.cache, engine.config, engine.mesh, capture=False, fewest_tokens=64
            )
        served.clear()
        llm.generate(prompts, params)
        found.append(list(served))
    assert found[0] == found[1]
    assert len({sum(step) for step in found[0]}) > 3, "the steps differ"
