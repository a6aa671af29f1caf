"""Bytes that attention exchanges: those of docs/CONTEXT_PARALLEL.md, and of the tensors that travel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.measure.costs.context_exchanges import decode_exchanges, prefill_exchanges
from dsa_engine.model.kv_cache import cache_dtype, cache_format
from dsa_engine.parallel.links import Links

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "CONTEXT_PARALLEL.md").read_text(encoding="utf-8")


def model(name: str, kind: str = "fp8") -> tuple[ModelConfig, CacheFormat]:
    config = ModelConfig.from_dict(released_config(name))
    return config, cache_format(config, cache_dtype(kind, torch.bfloat16))


def test_the_pages_bytes() -> None:
    config, cache = model("deepseek_v32")
    exchanges = decode_exchanges(config, cache, 1, 8, indexer=True)
    sent = {one.name: one.sent for one in exchanges}
    shown = [sum(sent.values()), sent["absorbed queries"], sent["results and log-sum-exp"], sent["keys of candidates"]]
    selected = 7 / 8 * config.index_topk * cache.latent.row_bytes
    step, earlier = prefill_exchanges(cache, 1 / 8, 1, 8, 8, indexer=True)
    shown += [selected, 2**20 * earlier.sent]
    assert step.sent == earlier.sent == 700
    for number in shown:
        assert f"{number:,.0f}" in PAGE, number
    _, plain = model("deepseek_v32", "bfloat16")
    (gather,) = prefill_exchanges(plain, 1 / 64, 0, 64, 1, indexer=True)
    assert gather.sent == 1386


@pytest.mark.parametrize(
    ("name", "size", "shown"),
    [("deepseek_v32", 8, 130), ("deepseek_v32", 16, 279), ("glm_5_2", 8, 80), ("glm_5_2", 16, 171)],
)
def test_bytes_of_a_step(name: str, size: int, shown: int) -> None:
    config, cache = model(name)
    kinds = config.indexer_types[: config.num_hidden_layers]
    exchanges = [one for kind in kinds for one in decode_exchanges(config, cache, 1, size, indexer=kind == "full")]
    assert round(sum(one.sent for one in exchanges) / 1e6) == shown and f"| {shown} |" in PAGE


def test_collectives_of_a_layer() -> None:
    """Of few rows candidates go to all ranks, of many to their own, whose thresholds go to all; of one rank nothing."""
    config, cache = model("deepseek_v32")
    assert decode_exchanges(config, cache, 4, 1, indexer=True) == []
    assert prefill_exchanges(cache, 100, 1000, 1, 1, indexer=True) == []
    assert len(prefill_exchanges(cache, 100, 0, 8, 4, indexer=True)) == 1
    few, many = (decode_exchanges(config, cache, rows, 8, indexer=True) for rows in (5, 6))
    assert len(many) == len(few) + 1 == 6 and len(decode_exchanges(config, cache, 4, 8, indexer=False)) == 3
    gathered = {one.name: one.gathers for one in few}, {one.name: one.gathers for one in many}
    assert [names["keys of candidates"] for names in gathered] == [True, False]
    for one in many:
        assert 7e-6 < one.seconds(Links(), 8) < one.seconds(Links(), 4)
