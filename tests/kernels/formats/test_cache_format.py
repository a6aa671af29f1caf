"""Formats of cache rows: sizes, borders, and that packing loses no more than the format must."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import FP8, CacheFormat, index_key_format, latent_format
from dsa_engine.kernels.formats.row_format import IndexKeyFormat, LatentFormat

# rank, rope, index key; bytes of an FP8 latent row and index key
FP8_SIZES = [(512, 64, 128, 656, 132), (384, 64, 64, 524, 68), (128, 16, 16, 164, 20)]
PLAIN = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("rank, rope, dim", [(512, 64, 128), (24, 10, 24), (33, 8, 3)])
def test_plain_rows(rank: int, rope: int, dim: int, dtype: torch.dtype) -> None:
    both = CacheFormat.of(rank, rope, dim, dtype)
    latent, key = both.latent, both.index_key
    assert key is not None and not latent.coded and latent.pool_dtype == key.pool_dtype == dtype
    assert latent.columns == latent.width == rank + rope and key.columns == key.width == dim
    assert latent.row_bytes == (rank + rope) * dtype.itemsize and key.row_bytes == dim * dtype.itemsize
    assert latent.rotated_at == rank


@pytest.mark.parametrize("rank, rope, dim, latent_bytes, key_bytes", FP8_SIZES)
def test_fp8_rows(rank: int, rope: int, dim: int, latent_bytes: int, key_bytes: int) -> None:
    both = CacheFormat.of(rank, rope, dim, FP8)
    latent, key = both.latent, both.index_key
    assert key is not None and latent.coded and latent.pool_dtype == key.pool_dtype == torch.uint8
    assert latent.width == rank + rope and latent.columns == latent.row_bytes == latent_bytes
    assert key.width == dim and key.columns == key.row_bytes == key_bytes
    assert latent.rotated_at == rank + 4 * rank // 128 and key.scales_at(64) == 64 * dim


@pytest.mark.parametrize("dtype", [*PLAIN, FP8])
@pytest.mark.parametrize("rank, rope, dim", [size[:3] for size in FP8_SIZES])
def test_packed_rows_hold_both_parts_and_little_more(rank: int, rope: int, dim: int, dtype: torch.dtype) -> None:
    both = CacheFormat.of(rank, rope, dim, dtype)
    assert both.index_key is not None
    for parts, with_key in ((both.latent.row_bytes, False), (both.latent.row_bytes + both.index_key.row_bytes, True)):
        row = both.packed_width(index_key=with_key) * both.latent.pool_dtype.itemsize
        assert row % 16 == 0 and parts <= row < parts + 16


def test_a_model_without_an_indexer() -> None:
    both = CacheFormat.of(512, 64, 0, torch.bfloat16)
    assert both.index_key is None and both.packed_width() == 576


@pytest.mark.parametrize("dtype", [*PLAIN, FP8])
def test_a_pool_is_checked_against_its_format(dtype: torch.dtype) -> None:
    for row_format in (latent_format(256, 16, dtype), index_key_format(32, dtype)):
        pool = row_format.empty_pool(3, 4, torch.device("cpu"))
        assert pool.shape == (3, 4, row_format.columns) and pool.dtype == row_format.pool_dtype
        row_format.check_pool(pool)
        for other in (pool[..., 1:], pool[0], pool.to(torch.int32)):
            with pytest.raises(ValueError, match=rf"is {pool.dtype} \[pages, page_size, {row_format.columns}\], not"):
                row_format.check_pool(other)


@pytest.mark.parametrize("dtype", [*PLAIN, FP8])
@pytest.mark.parametrize("row_format", [latent_format(256, 16, FP8), index_key_format(32, FP8)])
def test_packed_pages_give_their_numbers_back(
    row_format: LatentFormat | IndexKeyFormat, dtype: torch.dtype, device: str
) -> None:
    if isinstance(row_format, LatentFormat):
        row_format = latent_format(row_format.rank, row_format.rope, dtype)
    else:
        row_format = index_key_format(row_format.dim, dtype)
    rows = torch.randn(3, 5, row_format.width, generator=torch.Generator().manual_seed(0)).to(device)
    rows = rows if row_format.coded else rows.to(dtype)
    pages = row_format.pack(rows)
    assert pages.shape == (3, 5, row_format.columns) and pages.dtype == row_format.pool_dtype
    again = row_format.unpack(pages)
    if row_format.coded:
        # Half a step of e4m3, and of bfloat16 in the rotated part; small values of a block lie on a fixed grid.
        assert again.dtype == torch.float32 and float((again - rows).abs().max()) < rows.abs().max() / 16
        assert float((again - rows).norm() / rows.norm()) < 0.04
    else:
        assert torch.equal(again, rows)


@pytest.mark.parametrize("dtype", [*PLAIN, FP8])
def test_random_pages_are_standard_normal(dtype: torch.dtype, device: str) -> None:
    for row_format in (latent_format(256, 16, dtype), index_key_format(32, dtype)):
        pages = row_format.random_pages(50, 8, torch.Generator(device).manual_seed(1))
        numbers = row_format.unpack(pages).float()
        assert abs(float(numbers.mean())) < 0.05 and abs(float(numbers.std()) - 1) < 0.05
