"""Selection against a sort in plain Python: ties to the lower position, ascending order, −inf never."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.kernels.topk import select_topk


def by_sorting(row: list[float], k: int) -> tuple[list[int], int]:
    best = sorted((i for i, score in enumerate(row) if score > -math.inf), key=lambda i: (-row[i], i))[:k]
    return sorted(best) + [-1] * (k - len(best)), len(best)


def check(scores: torch.Tensor, k: int) -> None:
    before = scores.clone()
    positions, counts = select_topk(scores, k)
    expected = [by_sorting(row, k) for row in scores.tolist()]
    assert positions.dtype == counts.dtype == torch.int32
    assert positions.shape == (scores.shape[0], k) and counts.shape == (scores.shape[0],)
    assert positions.tolist() == [p for p, _ in expected]
    assert counts.tolist() == [c for _, c in expected]
    assert torch.equal(scores, before), "the scores were changed"


FEW = st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1e-30, 0.5, 3.0, math.inf])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 30).flatmap(lambda w: st.lists(st.lists(FEW, min_size=w, max_size=w), min_size=1, max_size=5)),
    st.integers(1, 40),
)
def test_rows_full_of_ties(rows: list[list[float]], k: int) -> None:
    check(torch.tensor(rows, dtype=torch.float32), k)


@pytest.mark.parametrize("width, k", [(1, 1), (777, 64), (3001, 256), (4096, 4096), (100, 101), (513, 512)])
@pytest.mark.parametrize("levels", [0, 5, 300])
def test_wide_rows(width: int, k: int, levels: int) -> None:
    """Random scores, and scores rounded to a few levels, under a causal mask with rows of every length."""
    scores = torch.randn(23, width, generator=torch.Generator().manual_seed(width + levels))
    if levels:
        scores = (scores * levels / 4).round() * 4 / levels
    visible = torch.arange(23) * width // 22  # from none to all
    scores.masked_fill_(torch.arange(width) >= visible[:, None], float("-inf"))
    check(scores, k)


def test_the_relu_case() -> None:
    """Most scores are exactly zero, as with few index heads: the first zeros fill the selection."""
    scores = torch.zeros(2, 1000)
    scores[0, [999, 500]] = 1.0
    positions, counts = select_topk(scores, 8)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 500, 999], list(range(8))] and counts.tolist() == [8, 8]


def test_lengths() -> None:
    """What lies behind a row's length counts nothing, whatever it holds; a row shorter than k passes through."""
    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([0, 1, 7, 8, 30, 50], dtype=torch.int32)
    masked = scores.masked_fill(torch.arange(50) >= lengths[:, None], -math.inf)
    expected = [by_sorting(row, 8) for row in masked.tolist()]
    undefined = torch.tensor([math.nan, math.inf, 1e30])[torch.randint(3, (6, 50))]
    positions, counts = select_topk(torch.where(masked == -math.inf, undefined, scores), 8, lengths)
    assert positions.tolist() == [p for p, _ in expected] and counts.tolist() == [c for _, c in expected]


def test_a_view_and_no_rows() -> None:
    wide = torch.randn(6, 90, generator=torch.Generator().manual_seed(0))
    check(wide[::2, 10:70], 7)
    positions, counts = select_topk(torch.empty(0, 9), 4)
    assert positions.shape == (0, 4) and counts.shape == (0,)


def test_bad_arguments() -> None:
    scores = torch.randn(2, 5)
    with pytest.raises(ValueError, match=r"float32 \[rows, width > 0\], not torch.float64 \(2, 5\)"):
        select_topk(scores.double(), 2)
    with pytest.raises(ValueError, match=r"not torch.float32 \(5,\)"):
        select_topk(scores[0], 2)
    with pytest.raises(ValueError, match="width > 0"):
        select_topk(torch.empty(3, 0), 2)
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        select_topk(scores, 0)
    with pytest.raises(ValueError, match=r"lengths must be \[2\], one for each row, not \(3,\)"):
        select_topk(scores, 2, torch.zeros(3, dtype=torch.int32))
