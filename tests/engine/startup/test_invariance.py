"""What ``batch_invariant`` cannot promise is refused by name, and nothing is without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_engine.engine.startup.weights import refuse_variant
from dsa_engine.kernels.runtime import cpu, launch
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import ParallelConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "given, text",
    [
        ({"kernels": "reference"}, "kernels"),
        ({"parallel": ParallelConfig(moe_combine_dtype="fp8")}, "moe_combine_dtype"),
        ({"parallel": ParallelConfig(dcp_size=2)}, "dcp_size 2"),
        (
            {"speculative_config": {"method": "mtp", "relaxed_topk": 3, "relaxed_delta": 0.1}},
            "speculative_config relaxed_topk",
        ),
    ],
)
def test_options(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"batch_invariant does not go with {text}"):
        refuse_variant(EngineOptions(batch_invariant=True, **given), torch.device("cuda"), torch.bfloat16)
    refuse_variant(EngineOptions(**given), torch.device("cuda"), torch.bfloat16)
    refuse_variant(EngineOptions(batch_invariant=True), torch.device("cuda"), torch.bfloat16)


def test_a_cpu_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "library", lambda: None)
    with pytest.raises(ValueError, match="C\\+\\+ compiler"):
        refuse_variant(EngineOptions(batch_invariant=True), CPU, torch.float32)


def test_products_of_pytorch() -> None:
    weight = torch.empty(8, 6).t()
    with launch.batch_invariance(True), pytest.raises(ValueError, match="another format of weights"):
        cpu.refuse_variant(weight, "it")
    cpu.refuse_variant(weight, "it")
