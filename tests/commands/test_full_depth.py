"""Latencies scaled to the full number of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench.full_depth import FullDepth, depth_factors
from dsa_engine.commands.bench.result import Result
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_config


def test_other_depths() -> None:
    raw = demo_config()
    whole = ModelConfig.from_dict(raw | {"num_hidden_layers": 61, "first_k_dense_replace": 3})
    few = ModelConfig.from_dict(raw | {"num_hidden_layers": 5, "first_k_dense_replace": 3})
    factors = depth_factors(few, whole)
    assert factors["MLA prolog"] == factors["lightning indexer"] == 61 / 5
    assert factors["dense MLP"] == 1 and factors["MoE experts"] == 29 and "LM head" not in factors
    stages = {"MLA prolog": 1.0, "dense MLP": 1.0, "MoE experts": 1.0, "LM head": 0.5, "other": 0.5}
    # Twice what the stages of the watched run add up to: only proportions count.
    result = Result(
        input_len=1, ranks=1, ttft=[8.0], prefill=[8.0], peak_memory_bytes=[1], stages={"prefill": [stages]}
    )
    depth = FullDepth(few, whole)
    assert depth.factors == factors and depth.scale(result) == {"ttft": pytest.approx(2e3 * (61 / 5 + 1 + 29 + 1))}
    assert "SCALED, not measured: 1 × 1 with all 61 layers instead of 5: TTFT 86,400.0 ms" in depth.line(result, "ttft")
    narrow = FullDepth(few, whole, hidden_size=512)
    assert "instead of 5, hidden_size 512: TTFT" in narrow.line(result, "ttft")
    with pytest.raises(ValueError, match="no MoE layer was measured and the whole model has 58; measure more layers"):
        depth_factors(ModelConfig.from_dict(raw | {"num_hidden_layers": 2, "first_k_dense_replace": 3}), whole)


def test_full_depth_is_that_of_the_file(demo_cache: Path) -> None:
    llm = LLM(
        "demo-random", device="cpu", load_format="dummy", hf_overrides={"num_hidden_layers": 2, "vocab_size": 640}
    )
    depth = FullDepth.of(llm)
    assert depth is not None and (depth.measured, depth.layers, depth.changed) == (2, 4, ", vocab_size 640")
    assert depth.factors["MoE experts"] == 3 and depth.factors["dense MLP"] == 1
    assert FullDepth.of(LLM("demo-random", device="cpu")) is None
