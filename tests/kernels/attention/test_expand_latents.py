"""Coded rows expanded once for a prefill: the same numbers and the same attention as those of the coded rows."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.attention.expand_latents import expand_latents, pays
from dsa_engine.kernels.attention.gather_latent import gather_latent
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import FP8, latent_format
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime import launch

PAGES = [7, 2, 5, 2, 0]  # one of them for two sequences


def problem(
    rank: int, rope: int, page_size: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, a pool whose other pages hold NaN, and slots of PAGES or −1."""
    g = torch.Generator().manual_seed(0)
    pool = latent_format(rank, rope, FP8).random_pages(9, page_size, g)
    pool[[1, 3, 4, 6, 8]] = 255
    slots = torch.tensor(PAGES)[torch.randint(5, (6, 90), generator=g)] * page_size
    slots += torch.randint(page_size, (6, 90), generator=g)
    slots[0, ::3] = slots[3] = -1
    q = torch.randn(6, 5, rank + rope, generator=g)
    return q.to(device, dtype), pool.to(device), slots.int().to(device)


@pytest.mark.parametrize(("rank", "rope", "page_size"), [(512, 64, 64), (128, 16, 5), (384, 10, 1), (256, 0, 16)])
def test_rows_and_slots(rank: int, rope: int, page_size: int, dtype: torch.dtype, device: str) -> None:
    """Bits of the rows, and of the attention of the references to them."""
    q, pool, slots = problem(rank, rope, page_size, dtype, device)
    pages, index = torch.tensor(PAGES, dtype=torch.int32, device=device), torch.zeros(9, dtype=torch.int32)
    for number, page in enumerate(PAGES):
        index[page] = number
    coded, plain = latent_format(rank, rope, FP8), latent_format(rank, rope, dtype)
    rows, moved = expand_latents(pool, slots, pages, index.to(device), coded, dtype)
    assert rows.shape == (5, page_size, rank + rope) and moved.dtype == torch.int32
    assert torch.equal(moved < 0, slots < 0)
    every = torch.arange(9 * page_size, device=device).view(9, page_size)[pages.long()].flatten()
    assert torch.equal(rows.flatten(0, 1), gather_latent(pool, every, coded, dtype))
    known = slots[slots >= 0].long()
    assert torch.equal(rows.flatten(0, 1)[moved[moved >= 0].long()], gather_latent(pool, known, coded, dtype))
    with launch.references():
        wanted = sparse_attention(q, pool, slots, row_format=coded, scale=0.1)
        for mine, theirs in zip(sparse_attention(q, rows, moved, row_format=plain, scale=0.1), wanted, strict=True):
            assert torch.equal(mine, theirs)
    out, lse = sparse_attention(q, rows, moved, row_format=plain, scale=0.1)
    torch.testing.assert_close(out, wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-2, atol=1e-2)


def decided(rows: int, context: int, heads: int = 128, chip: int = 90, workspace: int = 1 << 30, **how: object) -> bool:
    q = torch.empty(rows, heads, 576, dtype=how.get("dtype", torch.bfloat16), device="meta")  # type: ignore[call-overload]
    slots, stored = torch.empty(rows, 2048, dtype=torch.int32, device="meta"), how.get("stored", FP8)
    segments = Segments.of([Segment(0, rows - 1, 0, context - 2999 - rows), Segment(rows - 1, 1, 1, 2999)])
    with launch.compiling_for(chip):
        return pays(q, slots, segments, latent_format(512, 64, stored), workspace)  # type: ignore[arg-type]


def test_where_it_pays() -> None:
    assert decided(2048, 131_072) and decided(356, 131_072) and not decided(353, 131_072)
    assert decided(2048, 524_288) and not decided(2048, 524_289)
    assert decided(2048, 466_000, workspace=1 << 29) and not decided(2048, 467_000, workspace=1 << 29)
    assert decided(710, 131_072, heads=64) and not decided(700, 131_072, heads=64)
    assert not decided(2048, 131_072, chip=100) and not decided(2048, 131_072, chip=89)
    assert not decided(2048, 131_072, dtype=torch.float32)
    assert not decided(2048, 131_072, stored=torch.bfloat16), "plain rows are plain already"
    with launch.batch_invariance(True):
        assert not decided(2048, 131_072), "a row's bits would follow from the number of rows"
