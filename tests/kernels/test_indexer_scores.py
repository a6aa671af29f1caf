"""Index scores against the equation, written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.indexer_scores import indexer_scores
from dsa_engine.kernels.segment import Segment, Segments

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def naive(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    count, heads, _ = q.shape
    scores = torch.full((count, start + count), float("-inf"), dtype=torch.float64)
    for t in range(count):
        seen = keys[: start + t + 1].double()
        total = torch.zeros(len(seen), dtype=torch.float64)
        for h in range(heads):
            total += weights[t, h].double() * (seen @ q[t, h].double()).clamp(min=0)
        scores[t, : start + t + 1] = total
    return scores


def assert_scores(scores: torch.Tensor, segments: Segments, expected: torch.Tensor) -> None:
    """Equal in the visible columns; what lies behind them is not defined."""
    for row, visible in enumerate(segments.visible.tolist()):
        torch.testing.assert_close(scores[row, :visible].double(), expected[row, :visible], rtol=1e-5, atol=1e-4)


def problem(count: int, heads: int, dim: int, start: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(count * 31 + start)
    q = torch.randn(count, heads, dim, generator=g).to(dtype)
    weights = torch.randn(count, heads, generator=g)
    return [q, weights, torch.randn(start + count, dim, generator=g).to(dtype)]


@pytest.mark.parametrize("workspace", [1, 50_000, 256 << 20])
@pytest.mark.parametrize(
    "count, heads, dim, start, page_size",
    [
        (1, 1, 8, 0, 64),
        (1, 12, 24, 700, 64),  # decode
        (70, 3, 16, 0, 7),
        (33, 12, 24, 1000, 64),  # ends in the second tile of keys
        (50, 5, 24, 1023, 1),
        (300, 2, 8, 900, 100),  # tiles of keys that begin amid the queries
    ],
)
def test_scores(
    count: int, heads: int, dim: int, start: int, page_size: int, workspace: int, scattered_pages: Scatter
) -> None:
    q, weights, keys = problem(count, heads, dim, start)
    pool, tables = scattered_pages([keys], page_size)
    segments = Segments.of([Segment(0, count, 0, start)])
    scores = indexer_scores(q, weights, pool, tables, segments, workspace=workspace)
    assert scores.dtype == torch.float32 and scores.shape == (count, start + count)
    assert_scores(scores, segments, naive(q, weights, keys, start))


def test_ragged_batch(scattered_pages: Scatter) -> None:
    """A run in the middle of one sequence, single tokens of two others."""
    runs = [Segment(0, 20, 2, 300), Segment(20, 1, 0, 99), Segment(21, 1, 1, 0)]
    segments = Segments.of(runs)
    keys = [torch.randn(n, 16, generator=torch.Generator().manual_seed(n)) for n in (100, 1, 320)]
    q, weights, _ = problem(22, 12, 16, 0)
    pool, tables = scattered_pages(keys, 8)
    scores = indexer_scores(q, weights, pool, tables, segments)
    assert scores.shape == (22, 320)
    for s in runs:
        rows = slice(s.row, s.row + s.length)
        expected = naive(q[rows], weights[rows], keys[s.sequence], s.start)
        assert_scores(scores[rows], segments.part(s.row, s.row + s.length), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_multiplied_in_float32(dtype: torch.dtype, scattered_pages: Scatter) -> None:
    q, weights, keys = problem(40, 6, 24, 300, dtype)
    pool, tables = scattered_pages([keys], 16)
    segments = Segments.of([Segment(0, 40, 0, 300)])
    scores = indexer_scores(q, weights, pool, tables, segments)
    assert_scores(scores, segments, naive(q, weights, keys, 300))


def test_negative_products_count_nothing(scattered_pages: Scatter) -> None:
    pool, tables = scattered_pages([-torch.ones(5, 4)], 2)
    scores = indexer_scores(torch.ones(1, 3, 4), torch.ones(1, 3), pool, tables, Segments.of([Segment(0, 1, 0, 4)]))
    assert scores.tolist() == [[0.0] * 5]


def test_bad_arguments(scattered_pages: Scatter) -> None:
    q, weights, keys = problem(4, 3, 8, 0)
    pool, tables = scattered_pages([keys], 2)
    segments = Segments.of([Segment(0, 4, 0, 0)])
    with pytest.raises(ValueError, match=r"weights \(4, 2\)"):
        indexer_scores(q, weights[:, :2], pool, tables, segments)
    with pytest.raises(ValueError, match="do not fit together"):
        indexer_scores(q[..., :7], weights, pool, tables, segments)
