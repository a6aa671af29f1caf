"""Merging by log-sum-exp against the softmax over all parts, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.attention.merge_splits import merge_splits

Error = Callable[[torch.Tensor, torch.Tensor], float]


def naive(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    splits, tokens, heads, value_dim = out.shape
    merged = torch.zeros(tokens, heads, value_dim, dtype=torch.float64)
    total = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            some = [s for s in range(splits) if lse[s, t, h] > -math.inf]
            if some:
                total[t, h] = lse[some, t, h].double().exp().sum().log()
                merged[t, h] = sum((lse[s, t, h].double() - total[t, h]).exp() * out[s, t, h].double() for s in some)
    return merged, total


@pytest.mark.parametrize(
    "splits, tokens, heads, value_dim",
    [(1, 2, 3, 16), (2, 1, 5, 40), (7, 2, 3, 130), (64, 1, 2, 512), (33, 2, 1, 12), (3, 0, 4, 8)],
)
def test_against_lists(splits: int, tokens: int, heads: int, value_dim: int, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    out = torch.randn(splits, tokens, heads, value_dim, generator=g)
    lse = 5 * torch.randn(splits, tokens, heads, generator=g)
    merged, total = merge_splits(out.to(device), lse.to(device))
    expected, expected_total = naive(out, lse)
    assert (merged.dtype, total.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(merged.double().cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.double().cpu(), expected_total, rtol=1e-6, atol=1e-6)


def test_parts_without_rows_weigh_nothing(device: str) -> None:
    """They may hold anything; if all parts are without rows, the result is zero."""
    g = torch.Generator().manual_seed(1)
    out, lse = torch.randn(5, 3, 2, 24, generator=g), torch.randn(5, 3, 2, generator=g)
    lse[0, 0] = lse[2:, 1] = -math.inf
    lse[:, 2] = -math.inf
    expected, expected_total = naive(out, lse)
    out[lse == -math.inf] = math.nan
    merged, total = (x.cpu() for x in merge_splits(out.to(device), lse.to(device)))
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total.double(), expected_total, rtol=1e-6, atol=1e-6)
    assert not merged[2].any() and bool((total[2] == -math.inf).all())


def test_large_logarithms_do_not_overflow(device: str) -> None:
    out = torch.tensor([1.0, 3.0], device=device).view(2, 1, 1, 1).expand(2, 1, 1, 16).contiguous()
    for shift in (3e4, -3e4):
        merged, total = merge_splits(out, torch.full((2, 1, 1), shift, device=device))
        torch.testing.assert_close(merged, torch.full_like(merged, 2.0))
        torch.testing.assert_close(total, torch.full_like(total, shift + math.log(2)))


def test_dtype_of_the_result(dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    g = torch.Generator().manual_seed(2)
    out, lse = torch.randn(4, 2, 3, 32, generator=g), torch.randn(4, 2, 3, generator=g)
    merged, _ = merge_splits(out.to(device), lse.to(device), dtype)
    assert merged.dtype == dtype
    assert relative_error(merged, naive(out, lse)[0]) < bound


def test_parts_of_other_ranks(dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    """They come in the dtype of the result, and are added in float32."""
    g = torch.Generator().manual_seed(3)
    out, lse = torch.randn(8, 2, 3, 32, generator=g).to(dtype), torch.randn(8, 2, 3, generator=g)
    lse[1:, 0] = lse[:, 1, 0] = -math.inf
    out[lse == -math.inf] = math.nan
    merged, total = merge_splits(out.to(device), lse.to(device), dtype)
    expected, expected_total = naive(out, lse)
    assert merged.dtype == dtype and torch.equal(merged[0].cpu(), out[0, 0])
    assert relative_error(merged, expected) < bound and not merged[1, 0].any()
    torch.testing.assert_close(total.double().cpu(), expected_total, rtol=1e-6, atol=1e-6)
