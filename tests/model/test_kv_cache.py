"""The pools of a model, plain and FP8: what they take is what is counted everywhere, and what kernels write to them is
what kernels read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.cli import main as dsa_engine_command
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import FP8, CacheFormat
from dsa_engine.kernels.formats.hadamard import hadamard_reference
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.kernels.rows.store_latent import store_latent
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, cache_format

CPU = torch.device("cpu")
PAGES, PAGE_SIZE = 5, 4
SIZES = [(512, 64, 128), (256, 32, 64), (128, 16, 16)]
EPS = 1e-6


def raw(rank: int, rope: int, dim: int) -> dict[str, Any]:
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "index_head_dim": dim, "num_hidden_layers": 4}
    return released_config("deepseek_v32") | sizes


def make(rank: int, rope: int, dim: int, dtype: torch.dtype) -> KVCache:
    config = ModelConfig.from_dict(raw(rank, rope, dim))
    return KVCache(config, format=cache_format(config, dtype), pages=PAGES, page_size=PAGE_SIZE, device=CPU)


@pytest.mark.parametrize("rank, rope, dim", SIZES)
def test_all_commands_count_the_same_bytes(
    rank: int, rope: int, dim: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pools, the count that sizes them, the rows that kernels write, and ``dsa-engine info``."""
    (tmp_path / "config.json").write_text(json.dumps(raw(rank, rope, dim)))
    report = tmp_path / "info.json"
    dsa_engine_command(["info", str(tmp_path), "--memory", "1GB", "--json", str(report)])
    assert "cache per token" in capsys.readouterr().out
    rows = json.loads(report.read_text())["per_format"]
    printed = {row["weights"]: row["cache_bytes_per_token"] for row in rows}
    config = ModelConfig.from_dict(raw(rank, rope, dim))
    in_fp8 = cache_bytes_per_token(config, cache_format(config, FP8))
    for row in rows:
        tokens, remaining = row["tokens_that_fit_in_fp8_caches"], max(0, 10**9 - row["weight_bytes"])
        assert tokens * in_fp8 <= remaining < (tokens + 1) * in_fp8
    for dtype in (torch.float32, torch.bfloat16, FP8):
        cache = make(rank, rope, dim, dtype)
        held = sum(pool.nbytes for pool in [*cache.latent, *cache.index_keys] if pool is not None)
        per_token = cache_bytes_per_token(config, cache.format)
        assert held == PAGES * PAGE_SIZE * per_token
        assert dtype == FP8 or printed[str(dtype).removeprefix("torch.")] == per_token
        key_pool = cache.index_keys[0]
        assert key_pool is not None and cache.format.index_key is not None
        row_bytes = cache.latent[0].stride(1) * cache.latent[0].element_size(), key_pool.stride(1) * key_pool.itemsize
        assert row_bytes == (cache.format.latent.row_bytes, cache.format.index_key.row_bytes)


def test_a_rank_that_fp8_has_no_rows_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused by name; ``dsa-engine info`` says so and goes on."""
    config = ModelConfig.from_dict(raw(64, 16, 16))
    with pytest.raises(ValueError, match="an FP8 latent pool needs a rank that is a multiple of 128, not 64"):
        cache_format(config, FP8)
    (tmp_path / "config.json").write_text(json.dumps(raw(64, 16, 16)))
    dsa_engine_command(["info", str(tmp_path), "--memory", "1GB", "--json", str(tmp_path / "info.json")])
    assert "with kv_cache_dtype fp8" in capsys.readouterr().out
    printed = {r["weights"]: r for r in json.loads((tmp_path / "info.json").read_text())["per_format"]}
    assert {r["tokens_that_fit_in_fp8_caches"] for r in printed.values()} == {None}
    assert printed["bfloat16"]["cache_bytes_per_token"] == 4 * (80 + 16) * 2


class Tokens:
    """Raw projections of some tokens, and how they get to a cache."""

    def __init__(self, rank: int, rope: int, dim: int, count: int):
        g = torch.Generator().manual_seed(0)
        self.rank, self.rope, self.dim, self.count = rank, rope, dim, count
        self.compressed, self.projected = (
            torch.randn(count, rank + rope, generator=g),
            torch.randn(count, dim, generator=g),
        )
        angle = torch.rand(count, rope // 2, generator=g) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.slots = torch.randperm(PAGES * PAGE_SIZE, generator=g)[:count].int()

    def store(self, latents: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor | None, stored: CacheFormat) -> None:
        one, cos, sin, row_format, key_format = (
            torch.ones(self.dim),
            self.cos,
            self.sin,
            stored.latent,
            stored.index_key,
        )
        assert key_format is not None
        store_latent(
            self.compressed, torch.ones(self.rank), EPS, cos, sin, latents, slots, row_format=row_format,
            interleaved=True,
        )  # fmt: skip
        store_index_keys(
            self.projected, one, 0 * one, EPS, cos, sin, keys, slots, key_format=key_format, interleaved=False
        )

    def store_packed(self, cache: KVCache) -> None:
        """By way of the buffer that context parallelism gathers."""
        stored, key_pool = cache.format, cache.index_keys[0]
        assert stored.index_key is not None and key_pool is not None
        rows = torch.empty(self.count, stored.packed_width(), dtype=stored.latent.pool_dtype)
        border = stored.latent.columns
        self.store(rows[:, :border], rows[:, border : border + stored.index_key.columns], None, stored)
        store_cache_rows(cache.latent[0], key_pool, rows, self.slots, stored.index_key)


def read(cache: KVCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stored, key_pool = cache.format, cache.index_keys[0]
    assert stored.index_key is not None and key_pool is not None
    latents, keys = stored.latent.unpack(cache.latent[0]), stored.index_key.unpack(key_pool)
    return latents.flatten(0, 1)[slots.long()], keys.flatten(0, 1)[slots.long()]


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize("rank, rope, dim", SIZES)
def test_rows_are_read_as_they_were_stored(rank: int, rope: int, dim: int, dtype: torch.dtype) -> None:
    """By both ways to a pool: at once, and by the gathered buffer."""
    tokens = Tokens(rank, rope, dim, 13)
    wanted = torch.empty(13, rank + rope), torch.empty(13, dim)
    tokens.store(*wanted, None, CacheFormat.of(rank, rope, dim, torch.float32))
    for packed in (False, True):
        cache = make(rank, rope, dim, dtype)
        key_pool = cache.index_keys[0]
        assert key_pool is not None
        if packed:
            tokens.store_packed(cache)
        else:
            tokens.store(cache.latent[0], key_pool, tokens.slots, cache.format)
        latents, keys = read(cache, tokens.slots)
        if dtype == FP8:
            assert float((latents - wanted[0]).norm() / wanted[0].norm()) < 0.04
            keys = hadamard_reference(keys, dim**-0.5)  # its own inverse
            assert float((keys - wanted[1]).norm() / wanted[1].norm()) < 0.04
        else:
            assert torch.equal(latents, wanted[0]) and torch.equal(keys, wanted[1])


def test_an_fp8_cache_is_attended_to() -> None:
    """Scores and attention over an FP8 cache are near those over a plain one."""
    rank, rope, dim = SIZES[1]
    count, heads = 13, 3
    tokens = Tokens(rank, rope, dim, count)
    tokens.slots = torch.arange(count, dtype=torch.int32)
    g = torch.Generator().manual_seed(1)
    q, index_q = torch.randn(count, heads, rank + rope, generator=g), torch.randn(count, heads, dim, generator=g)
    weights, scale = torch.rand(count, heads, generator=g), (rank + rope) ** -0.5
    tables = torch.arange(PAGES, dtype=torch.int32)[None]
    segments = Segments.of([Segment(0, count, 0, 0)], CPU)
    results = []
    for dtype in (torch.float32, FP8):
        cache = make(rank, rope, dim, dtype)
        pool, key_pool, stored = cache.latent[0], cache.index_keys[0], cache.format
        assert key_pool is not None and stored.index_key is not None
        tokens.store_packed(cache)
        out, _ = dense_mla(q, pool, tables, segments, row_format=stored.latent, scale=scale)
        slots = torch.arange(count, dtype=torch.int32).expand(count, -1).contiguous()
        selected, _ = sparse_attention(q, pool, slots, row_format=stored.latent, scale=scale, counts=segments.visible)
        torch.testing.assert_close(selected, out, rtol=1e-4, atol=1e-4)
        if dtype == FP8:
            codes, weighted = quantize_index_queries(
                index_q, weights, tokens.cos, tokens.sin, key_format=stored.index_key, interleaved=False
            )
            scores = indexer_scores(codes, weighted, key_pool, tables, segments, key_format=stored.index_key)
        else:
            turned = torch.cat((index_q[..., :0], _turned(index_q, tokens)), dim=-1)
            scores = indexer_scores(turned, weights, key_pool, tables, segments, key_format=stored.index_key)
        results.append((out, scores.tril()))
    for plain, quantised in zip(*results, strict=True):
        assert float((plain - quantised).norm() / plain.norm()) < 0.06


def _turned(q: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    half = tokens.rope // 2
    a, b, rest = q[..., :half], q[..., half : 2 * half], q[..., 2 * half :]
    cos, sin = tokens.cos[:, None], tokens.sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_random_rows_go_to_their_pages_only(dtype: torch.dtype) -> None:
    cache = make(*SIZES[2], dtype)
    pools = [pool for pool in [*cache.latent, *cache.index_keys] if pool is not None]
    for pool in pools:
        pool.zero_()
    cache.fill_random([3, 1], seed=5)
    for pool in pools:
        assert bool(pool[[1, 3]].any()) and not pool[[0, 2, 4]].any()
    before = [pool.clone() for pool in pools]
    cache.fill_random([3, 1], seed=5)
    assert all(torch.equal(a, b) for a, b in zip(before, pools, strict=True))


def test_layers_without_index_keys() -> None:
    types = ["full", "shared", "shared", "full"]
    config = ModelConfig.from_dict(raw(*SIZES[2]) | {"model_type": "glm_moe_dsa", "indexer_types": types})
    cache = KVCache(config, cache_format(config, FP8), PAGES, PAGE_SIZE, CPU)
    assert [pool is None for pool in cache.index_keys] == [False, True, True, False]
    assert cache_bytes_per_token(config, cache.format) == 4 * 164 + 2 * 20
    assert isinstance(cache.format, CacheFormat) and cache.format.packed_width(index_key=False) == 176
