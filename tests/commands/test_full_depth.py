"""Latencies scaled to the full number of layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.bench.full_depth import FullDepth, first_layers
from dsa_engine.commands.bench.result import Result
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_config


def result(ttft: float) -> Result:
    return Result(input_len=1, ranks=1, ttft=[ttft], prefill=[ttft], peak_memory_bytes=[1], stages={})


def test_other_depths() -> None:
    raw = demo_config()
    whole = ModelConfig.from_dict(raw | {"num_hidden_layers": 61, "first_k_dense_replace": 3})
    few = ModelConfig.from_dict(raw | {"num_hidden_layers": 5, "first_k_dense_replace": 3})
    depth = FullDepth(few, whole)
    scaled = depth.to_json(result(8.0), result(7.0))["scaled_to_full_depth"]
    assert (depth.fewer, scaled["ttft_ms"], scaled["fewer_ttft_ms"]) == (3, 8000 + 56 * 500, 7000)
    line = depth.line("1 × 1", scaled, "ttft")
    assert line.startswith("SCALED, not measured: 1 × 1 with all 61 layers instead of 5: TTFT 36,000.0 ms, by the")
    narrow = FullDepth(few, whole, hidden_size=512)
    assert "instead of 5, hidden_size 512: TTFT" in narrow.line("1 × 1", scaled, "ttft")
    with pytest.raises(ValueError, match="of 3 layers the second half, .* to 61, has no sparse one; measure more"):
        FullDepth(ModelConfig.from_dict(raw | {"num_hidden_layers": 3, "first_k_dense_replace": 3}), whole)


def test_first_layers_are_a_model_of_as_many(demo_cache: Path) -> None:
    """Also where decode steps were recorded with all layers; afterwards all are there again."""
    prompt, params = [[*range(40, 90)]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens(llm: LLM) -> list[int]:
        return list(llm.generate(prompt, params)[0].token_ids)

    llm = LLM("demo-random", device="cpu", progress=False, enable_prefix_caching=False)
    fewer = LLM("demo-random", device="cpu", progress=False, hf_overrides={"num_hidden_layers": 2})
    before = tokens(llm)
    with first_layers(llm.engine, 2):
        assert tokens(llm) == tokens(fewer) != before
    assert tokens(llm) == before


def test_full_depth_is_that_of_the_file(demo_cache: Path) -> None:
    llm = LLM(
        "demo-random", device="cpu", load_format="dummy", hf_overrides={"num_hidden_layers": 2, "vocab_size": 640}
    )
    depth = FullDepth.of(llm)
    assert depth is not None and (depth.measured, depth.layers, depth.changed) == (2, 4, ", vocab_size 640")
    assert depth.fewer == 1
    assert FullDepth.of(LLM("demo-random", device="cpu")) is None
