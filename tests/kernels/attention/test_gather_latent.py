"""Latent rows gathered from plain and FP8 pools, against their bytes read one by one."""

from __future__ import annotations

import struct

import pytest
import torch

from caches import need_memory
from dsa_engine.kernels.attention.gather_latent import gather_latent
from dsa_engine.kernels.formats.cache_format import FP8, latent_format


def naive(row: torch.Tensor, rank: int) -> list[float]:
    """The numbers of an FP8 row, from its bytes."""
    given = bytes(row.tolist())
    scales = struct.unpack_from(f"<{rank // 128}f", given, rank)
    numbers = []
    for i, code in enumerate(given[:rank]):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        numbers.append((-size if code & 0x80 else size) * scales[i // 128])
    rotated = struct.unpack_from(f"<{(len(given) - rank - rank // 32) // 2}H", given, rank + rank // 32)
    return numbers + [struct.unpack("<f", struct.pack("<I", end << 16))[0] for end in rotated]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rank, rope", [(512, 64), (128, 16), (384, 10), (256, 0)])
def test_fp8_rows(rank: int, rope: int, power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    numbers = torch.randn(35, rank + rope, generator=g) * torch.randn(35, 1, generator=g).exp()
    numbers[4, :128] = 0.0
    pool = latent_format(rank, rope, FP8, power_of_two).pack(numbers).view(5, 7, -1)
    slots = torch.randint(35, (21,), generator=g, dtype=torch.int32)  # some named twice
    got = gather_latent(pool.to(device), slots.to(device), latent_format(rank, rope, FP8), dtype)
    assert got.dtype == dtype and got.shape == (21, rank + rope)
    wanted = torch.tensor([naive(row, rank) for row in pool.view(35, -1)[slots.long()]], dtype=torch.float64)
    # The product of a code and a scale is made in float32; then each is rounded once.
    assert torch.equal(got.cpu(), wanted.float().to(dtype))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_plain_rows(index: torch.dtype, dtype: torch.dtype, device: str) -> None:
    pool = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    slots = torch.tensor([11, 0, 5, 5], dtype=index, device=device)
    assert torch.equal(gather_latent(pool, slots, latent_format(16, 8, dtype), dtype), pool.view(12, 24)[slots.long()])


@pytest.mark.parametrize("stored", [torch.float32, FP8])
def test_no_row(stored: torch.dtype, device: str) -> None:
    row_format = latent_format(128, 8, stored)
    pool = row_format.empty_pool(2, 2, torch.device(device))
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert gather_latent(pool, none, row_format, torch.float32).shape == (0, 136)


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """The last row of a pool of more than 2^31 bytes, of which no more is touched."""
    row_format = latent_format(512, 64, FP8)
    pages = 2**31 // (64 * row_format.columns) + 2
    need_memory(device, 1.1 * pages * 64 * row_format.columns)
    pool = row_format.empty_pool(pages, 64, torch.device(device))
    numbers = torch.randn(576, generator=torch.Generator().manual_seed(0))
    pool[-1, -1] = row_format.pack(numbers).to(device)
    slots = torch.tensor([pages * 64 - 1], dtype=torch.int32, device=device)
    got = gather_latent(pool, slots, row_format, torch.float32)
    assert torch.equal(got[0].cpu(), row_format.unpack(row_format.pack(numbers)))
