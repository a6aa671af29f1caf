"""Counted bytes of a rank's weights equal those of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.model.rank_weights import rank_model, weight_bytes


@pytest.mark.parametrize("quantization", ["fp8", "dequantize"])
@pytest.mark.parametrize("ranks, tp_size, vocab", [(1, 1, 320), (5, 1, 320), (4, 4, 320), (4, 4, 331)])
def test_counted_as_held(demo_cache: Path, quantization: str, ranks: int, tp_size: int, vocab: int) -> None:
    """24 experts on 5 ranks: the first holds one more than the last. What 4 ranks share is cut between blocks; the
    padding of a vocabulary takes memory too."""
    llm = LLM(
        "demo-random", device="cpu", dtype="bfloat16", quantization=quantization, max_model_len=256,
        cache_memory="8MiB", progress=False, load_format="dummy",
        parallel=EmulatedConfig(emulate_world=ranks, tp_size=tp_size), hf_overrides={"vocab_size": vocab},
    )  # fmt: skip
    held = sum(parameter.nbytes for parameter in llm.engine.model.parameters())
    assert llm.engine.model.lm_head.shape[0] == {1: vocab, 4: (vocab + 3) // 4}[tp_size]
    config = llm.engine.config
    stored = config.quantization if quantization == "fp8" else None
    assert weight_bytes(rank_model(config, stored, torch.bfloat16, ranks, tp_size)) == held


def test_the_whole_model_on_eight_ranks() -> None:
    """DeepSeek-V3.2 as stored is half of what it is in bfloat16, and a little more."""
    config = ModelConfig.from_dict(released_config("deepseek_v32"), {"num_hidden_layers": 5})
    fp8, plain = (weight_bytes(rank_model(config, stored, torch.bfloat16, 8)) for stored in (config.quantization, None))
    tables = 2 * 2 * config.vocab_size * config.hidden_size  # embedding and LM head are not quantised
    assert 0.5 < (fp8 - tables) / (plain - tables) < 0.53
