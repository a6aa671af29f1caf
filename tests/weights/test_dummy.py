"""Random weights instead of a checkpoint's."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.weights import DummyReader, Source
from dsa_engine.weights import dummy as dummy_module


def test_dummy_weights_depend_on_seed_name_and_index_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy_module, "RANDOM_BLOCK_ELEMENTS", 300)  # several blocks of rows
    reader = DummyReader(seed=3)

    def load(
        name: str, size: tuple[int, ...], shape: tuple[int, ...], start: tuple[int, ...] = (), seed: int = 3
    ) -> torch.Tensor:
        into = torch.full(size, torch.nan)
        (reader if seed == 3 else DummyReader(seed)).load(Source(name, into, shape, start))
        return into

    whole = load("a.weight", (100, 40), (100, 40))
    assert 0.018 < whole.std() < 0.022 and whole.mean().abs() < 0.002
    assert len(whole.unique()) > 3900  # no block repeats another
    assert torch.equal(load("a.weight", (31, 9), (100, 40), (13, 30)), whole[13:44, 30:39])
    assert torch.equal(load("a.weight", (100, 40), (100, 40)), whole)
    assert not torch.equal(load("b.weight", (100, 40), (100, 40)), whole)
    assert not torch.equal(load("a.weight", (100, 40), (100, 40), seed=4), whole)
    assert (load("model.layers.0.input_layernorm.weight", (5,), (10,), (5,)) == 1).all()
    assert (load("model.norm.weight", (5,), (5,)) == 1).all()
    assert (load("self_attn.indexer.k_norm.bias", (5,), (5,)) == 0).all()
    assert (load("mlp.gate.e_score_correction_bias", (5,), (5,)) == 0).all()
    for name in ("mlp.gate.weight", "self_attn.indexer.weights_proj.weight"):
        held = load(f"model.layers.3.{name}", (100, 40), (100, 40))
        assert torch.equal(held, held.bfloat16().float()) and 0.018 < held.std() < 0.022
    assert reader.bytes_read == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_dummy_codes_have_the_spread_of_dummy_weights(dtype: torch.dtype) -> None:
    codes, scale = torch.empty(100, 400, dtype=dtype), torch.empty(1, 4)
    reader = DummyReader(seed=3)
    reader.load(Source("w", codes, (100, 400)))
    reader.load(Source("w_scale", scale, (1, 4), scale_of=dtype))
    assert len(scale.unique()) == 1
    assert 0.018 < (codes.float() * scale[0, 0]).std() < 0.022
    part = torch.empty(10, 400, dtype=dtype)
    reader.load(Source("w", part, (100, 400), (20, 0)))
    assert torch.equal(part.view(torch.uint8), codes[20:30].view(torch.uint8))
