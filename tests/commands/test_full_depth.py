"""Latencies scaled to the full number of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench.full_depth import FullDepth, depth_factors
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_config
from dsa_engine.measure.reported_latency import Latency


def test_other_depths() -> None:
    raw = demo_config()
    whole = ModelConfig.from_dict(raw | {"num_hidden_layers": 61, "first_k_dense_replace": 3})
    few = ModelConfig.from_dict(raw | {"num_hidden_layers": 5, "first_k_dense_replace": 3})
    factors = depth_factors(few, whole)
    assert factors["MLA prolog"] == factors["lightning indexer"] == 61 / 5
    assert factors["dense MLP"] == 1 and factors["MoE experts"] == 29 and "LM head" not in factors
    stages = {"MLA prolog": 1.0, "dense MLP": 1.0, "MoE experts": 1.0, "LM head": 0.5, "other": 0.5}
    latency = Latency("ttft", [8.0], 1, 1)  # twice what the stages of the watched run add up to: only proportions count
    grown = 2 * (61 / 5 + 1 + 29 + 1)
    assert latency.scaled(stages, factors) == pytest.approx(grown * 1e3)
    with pytest.raises(ValueError, match="no MoE layer was measured and the whole model has 58; measure more layers"):
        depth_factors(ModelConfig.from_dict(raw | {"num_hidden_layers": 2, "first_k_dense_replace": 3}), whole)


def test_full_depth_is_that_of_the_file(demo_cache: Path) -> None:
    llm = LLM(
        "demo-random", device="cpu", load_format="dummy", hf_overrides={"num_hidden_layers": 2, "vocab_size": 640}
    )
    depth = FullDepth.of(llm)
    assert depth is not None and (depth.measured, depth.layers) == (2, 4)
    assert depth.factors["MoE experts"] == 3 and depth.factors["dense MLP"] == 1
    assert "SCALED, not measured" in depth.line("x", "ttft", {"ttft": 5.0})
    assert FullDepth.of(LLM("demo-random", device="cpu")) is None
