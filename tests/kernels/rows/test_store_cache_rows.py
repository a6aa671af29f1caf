"""Both parts of gathered rows at their slots, and an FP8 key's scale at the end of its page."""

from __future__ import annotations

import pytest
import torch

from caches import need_memory
from dsa_engine.kernels.formats.cache_format import FP8, CacheFormat, index_key_format
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows

KEYS = index_key_format(4, torch.float32)


def scattered(rows: int, slots: int) -> list[int]:
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(0))[:rows].tolist()
    return [-1 if i % 4 == 1 else slot for i, slot in enumerate(order)]


@pytest.mark.parametrize(
    "latent, dim, rows, padding", [(576, 128, 21, 0), (40, 24, 130, 8), (7, 3, 9, 1), (576, 128, 1, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers(dtype: torch.dtype, latent: int, dim: int, rows: int, padding: int, device: str) -> None:
    buffer = torch.randn(rows, latent + dim + padding, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    latents = torch.full((20, 7, latent), float("nan"), dtype=dtype, device=device)
    keys = torch.full((20, 7, dim), float("nan"), dtype=dtype, device=device)
    slots = scattered(rows, 140)
    store_cache_rows(latents, keys, buffer, torch.tensor(slots, device=device), index_key_format(dim, dtype))
    for part, pool in ((buffer[:, :latent], latents), (buffer[:, latent : latent + dim], keys)):
        flat = pool.view(140, -1)
        for row, slot in enumerate(slots):
            assert slot < 0 or torch.equal(flat[slot], part[row])
        assert bool(flat[[slot for slot in range(140) if slot not in slots]].isnan().all())


@pytest.mark.parametrize("latent, rank, rope, dim, rows", [(656, 512, 64, 128, 11), (164, 128, 16, 16, 70)])
def test_fp8(latent: int, rank: int, rope: int, dim: int, rows: int, device: str) -> None:
    width = CacheFormat.of(rank, rope, dim, FP8).packed_width()
    g = torch.Generator().manual_seed(0)
    buffer = torch.randint(0, 255, (rows, width), generator=g, dtype=torch.uint8).to(device)
    latents = torch.full((20, 5, latent), 255, dtype=torch.uint8, device=device)
    keys = torch.full((20, 5, dim + 4), 255, dtype=torch.uint8, device=device)
    slots = scattered(rows, 100)
    at = torch.tensor(slots, dtype=torch.int32, device=device)
    store_cache_rows(latents, keys, buffer, at, index_key_format(dim, FP8))
    pages = keys.view(20, -1)
    values, scales = pages[:, : 5 * dim].reshape(100, dim), pages[:, 5 * dim :].reshape(100, 4)
    for row, slot in enumerate(slots):
        if slot >= 0:
            whole = torch.cat((latents.view(100, -1)[slot], values[slot], scales[slot]))
            assert torch.equal(whole, buffer[row, : latent + dim + 4])
    empty = [slot for slot in range(100) if slot not in slots]
    assert all(bool((part[empty] == 255).all()) for part in (latents.view(100, -1), values, scales))


def test_nothing(device: str) -> None:
    latents, keys = torch.zeros(2, 3, 8, device=device), torch.zeros(2, 3, 4, device=device)
    for slots in (torch.empty(0, dtype=torch.int32, device=device), torch.tensor([-1] * 3, device=device)):
        store_cache_rows(latents, keys, torch.ones(len(slots), 12, device=device), slots, KEYS)
    assert not latents.any() and not keys.any()


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """The last pages of pools of more than 2^31 bytes, of which no more is touched."""
    pages = 2**31 // (64 * 132) + 2
    need_memory(device, 1.1 * pages * 64 * (656 + 132))
    latents = torch.empty(pages, 64, 656, dtype=torch.uint8, device=device)
    keys = torch.empty(pages, 64, 132, dtype=torch.uint8, device=device)
    latents[-1], keys[-1] = 0, 0
    buffer = (torch.arange(2 * 800).view(2, 800) % 251).to(torch.uint8).to(device)
    store_cache_rows(
        latents, keys, buffer, torch.tensor([pages * 64 - 1, pages * 64 - 2], device=device), index_key_format(128, FP8)
    )
    assert torch.equal(latents[-1, [63, 62]], buffer[:, :656]) and not latents[-1, :62].any()
    page = keys[-1].flatten()
    assert torch.equal(page[: 64 * 128].view(64, 128)[[63, 62]], buffer[:, 656:784])
    assert torch.equal(page[64 * 128 :].view(64, 4)[[63, 62]], buffer[:, 784:788])
