"""The lightning indexer against scoring and sorting in full; memory that does not grow with S²."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.lightning_indexer import lightning_indexer
from dsa_engine.kernels.segment import Segment, Segments

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]
HEADS, DIM = 3, 8


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers: sums of their products are exact in float32, so that ties are real and no rounding hides them."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def naive(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, position: int, k: int) -> list[int]:
    products = torch.einsum("hd,sd->hs", q.double(), keys[: position + 1].double()).clamp(min=0)
    scores = (weights.double() @ products).tolist()
    best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:k]
    return sorted(best) + [-1] * (k - len(best))


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("workspace", [1, 20_000, 256 << 20])
def test_ragged_batch(page_size: int, workspace: int, scattered_pages: Scatter) -> None:
    """Two runs of one sequence (as head-tail gives), a whole sequence, one token of a third; in any order of rows."""
    keys = [whole_numbers(n, DIM, seed=n) for n in (211, 60, 131)]
    segments = [
        Segment(row=0, length=40, sequence=0, start=20),
        Segment(row=40, length=31, sequence=0, start=180),
        Segment(row=71, length=60, sequence=1, start=0),
        Segment(row=131, length=1, sequence=2, start=130),
    ]
    q, weights = whole_numbers(132, HEADS, DIM, seed=1), whole_numbers(132, HEADS, seed=2)
    pool, tables = scattered_pages(keys, page_size)
    k = 16
    positions = lightning_indexer(q, weights, pool, tables, Segments.of(segments), k, workspace=workspace)
    assert positions.dtype == torch.int32 and positions.shape == (132, k)
    for s in segments:
        for i in range(s.length):
            expected = naive(q[s.row + i], weights[s.row + i], keys[s.sequence], s.start + i, k)
            assert positions[s.row + i].tolist() == expected


def test_k_beyond_what_is_visible(scattered_pages: Scatter) -> None:
    keys = whole_numbers(5, DIM, seed=0)
    pool, tables = scattered_pages([keys], 4)
    q, weights = whole_numbers(5, HEADS, DIM, seed=1), whole_numbers(5, HEADS, seed=2)
    positions = lightning_indexer(q, weights, pool, tables, Segments.of([Segment(0, 5, 0, 0)]), 9)
    assert positions.tolist() == [[*range(t + 1), *[-1] * (8 - t)] for t in range(5)]


def test_no_queries(scattered_pages: Scatter) -> None:
    pool, tables = scattered_pages([torch.zeros(3, DIM)], 4)
    assert lightning_indexer(
        torch.empty(0, HEADS, DIM), torch.empty(0, HEADS), pool, tables, Segments.of([]), 6
    ).shape == (0, 6)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("start, length", [(19_000, 1_000), (0, 4_000)])
def test_memory_stays_within_the_workspace(
    start: int, length: int, ties: bool, peak_memory: Callable[..., int]
) -> None:
    """All scores of 1,000 queries over 20,000 tokens would take 80 MB, and the products of 16 heads 1.3 GB."""
    total, heads, dim, k, workspace = start + length, 16, 16, 64, 8 << 20
    g = torch.Generator().manual_seed(0)
    q, weights = torch.randn(length, heads, dim, generator=g), torch.randn(length, heads, generator=g)
    weights *= not ties  # then every score is zero
    pool = torch.randn(-(-total // 64), 64, dim, generator=g)
    tables = torch.arange(len(pool), dtype=torch.int32)[None]
    segments = [Segment(0, length, 0, start)]

    def run() -> Any:
        return lightning_indexer(q, weights, pool, tables, Segments.of(segments), k, workspace=workspace)

    result = length * k * 4
    peak = peak_memory(run)
    print(f"peak {peak / 2**20:.1f} MiB")
    # Rows in which scores tie at the last place are selected a second time, with more temporaries.
    assert peak < workspace * (1.5 if ties else 1) + result + (1 << 20)


def test_bad_segments(scattered_pages: Scatter) -> None:
    pool, tables = scattered_pages([torch.zeros(10, DIM)], 4)
    q, weights = torch.zeros(3, HEADS, DIM), torch.zeros(3, HEADS)
    for segment, message in (
        (Segment(0, 4, 0, 0), "have 4 rows, the batch has 3"),
        (Segment(0, 3, 1, 0), "outside of the block table with 1 rows"),
        (Segment(0, 3, 0, 10), "ends at token 13, its block table holds 3 pages of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            lightning_indexer(q, weights, pool, tables, Segments.of([segment]), 2)
