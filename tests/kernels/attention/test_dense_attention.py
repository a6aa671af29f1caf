"""Dense attention over expanded keys and values against a causal softmax in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.attention.dense_attention import dense_attention
from dsa_engine.kernels.rows.segment import CuSeqlens

SCALE = 0.29


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """One sequence."""
    return dense_attention(q, k, v, CuSeqlens.of([len(q)]), CuSeqlens.of([len(k)]), **options)


def problem(count: int, total: int, heads: int, dim: int, value_dim: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(total)
    sizes = ((count, dim), (total, dim), (total, value_dim))
    return [torch.randn(n, heads, width, generator=g) for n, width in sizes]


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = k.shape[0] - q.shape[0] + i + 1
        scores = torch.einsum("hd,shd->hs", q[i].double(), k[:seen].double()) * SCALE
        out[i] = torch.einsum("hs,shd->hd", scores.softmax(dim=-1), v[:seen].double())
    return out


@pytest.mark.parametrize("workspace", [1, 5_000, 256 << 20])
@pytest.mark.parametrize("dim, value_dim", [(24, 24), (24, 16), (12, 20)])
@pytest.mark.parametrize("count, total", [(1, 1), (1, 77), (77, 77), (30, 131), (130, 131)])
def test_against_a_loop(count: int, total: int, dim: int, value_dim: int, workspace: int) -> None:
    q, k, v = problem(count, total, 3, dim, value_dim)
    out = attend(q, k, v, scale=SCALE, workspace=workspace)
    assert out.shape == (count, 3, value_dim)
    torch.testing.assert_close(out.double(), naive(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workspace", [1, 256 << 20])
@pytest.mark.parametrize("sizes", [[(5, 5), (1, 40), (17, 60)], [(3, 7), (3, 30)], []])
def test_several_sequences(sizes: list[tuple[int, int]], workspace: int) -> None:
    """Each sequence sees its own keys only; the second case is like head and tail of one sequence."""
    parts = [problem(count, total, 3, 12, 8) for count, total in sizes]
    q, k, v = (torch.cat([part[i] for part in parts] or [torch.empty(0, 3, (12, 12, 8)[i])]) for i in range(3))
    queries, keys = (CuSeqlens.of([size[i] for size in sizes]) for i in range(2))
    out = dense_attention(q, k, v, queries, keys, scale=SCALE, workspace=workspace)
    assert out.shape == (sum(count for count, _ in sizes), 3, 8)
    wide = torch.full((*out.shape[:2], 11), 5.0)
    dense_attention(q, k, v, queries, keys, scale=SCALE, workspace=workspace, out=wide[..., 1:9])
    assert torch.equal(wide[..., 1:9], out) and (wide[..., [0, 9, 10]] == 5).all()
    for (first, last), part in zip(queries, parts, strict=True):
        torch.testing.assert_close(out[first:last].double(), naive(*part), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    q, k, v = (t.to(dtype) for t in problem(40, 90, 4, 24, 16))
    out = attend(q, k, v, scale=SCALE)
    expected = naive(q, k, v)
    assert out.dtype == dtype
    assert float((out.double() - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("count, total", [(3000, 3000), (1500, 3000)])
@pytest.mark.parametrize("dim, value_dim", [(24, 24), (24, 16), (16, 24)])
def test_memory_stays_within_the_workspace(
    count: int, total: int, dim: int, value_dim: int, peak_memory: Callable[..., int]
) -> None:
    """All scores of 3,000 queries over 3,000 keys would take 36 MB a head, 144 MB in all."""
    q, k, v = problem(count, total, 4, dim, value_dim)
    workspace = 4 << 20
    peak = peak_memory(lambda: attend(q, k, v, scale=SCALE, workspace=workspace))
    inputs_and_outputs = 4 * (2 * q.numel() + 2 * k.numel() + 2 * v.numel())
    print(f"peak {peak / 2**20:.1f} MiB")
    assert peak < workspace + inputs_and_outputs + (1 << 20)
