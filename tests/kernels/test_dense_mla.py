"""Dense attention over the latent cache against a causal softmax in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.dense_mla import dense_mla
from dsa_engine.kernels.segment import Segment, Segments

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]
HEADS, WIDTH, VALUE, SCALE = 3, 20, 16, 0.3
LENGTHS = (97, 5, 40)
SEGMENTS = [
    Segment(row=0, length=30, sequence=0, start=0),
    Segment(row=30, length=7, sequence=0, start=90),
    Segment(row=37, length=1, sequence=1, start=4),
    Segment(row=38, length=40, sequence=2, start=0),
]


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(78, HEADS, WIDTH, generator=g).to(dtype)
    return q, [torch.randn(n, WIDTH, generator=g).to(dtype) for n in LENGTHS]


def naive(q: torch.Tensor, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(q.shape[0], HEADS, VALUE, dtype=torch.float64)
    lse = torch.empty(q.shape[0], HEADS, dtype=torch.float64)
    for s in SEGMENTS:
        for i in range(s.length):
            seen = rows[s.sequence][: s.start + i + 1].double()
            scores = q[s.row + i].double() @ seen.T * SCALE
            out[s.row + i] = scores.softmax(dim=-1) @ seen[:, :VALUE]
            lse[s.row + i] = scores.exp().sum(dim=-1).log()
    return out, lse


@pytest.mark.parametrize("page_size", [1, 6, 64])
@pytest.mark.parametrize("workspace", [1, 10_000, 256 << 20])
def test_ragged_batch(page_size: int, workspace: int, scattered_pages: Scatter) -> None:
    q, rows = problem()
    pool, tables = scattered_pages(rows, page_size)
    out, lse = dense_mla(q, pool, tables, Segments.of(SEGMENTS), value_dim=VALUE, scale=SCALE, workspace=workspace)
    expected, expected_lse = naive(q, rows)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype: torch.dtype, bound: float, scattered_pages: Scatter) -> None:
    q, rows = problem(dtype)
    pool, tables = scattered_pages(rows, 8)
    out, lse = dense_mla(q, pool, tables, Segments.of(SEGMENTS), value_dim=VALUE, scale=SCALE)
    expected, _ = naive(q, rows)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert float((out.double() - expected).norm() / expected.norm()) < bound


def test_memory_stays_within_the_workspace(peak_memory: Callable[..., int]) -> None:
    """Scores of all 2,000 queries would take 64 MB a head."""
    count, start, workspace = 2000, 6000, 8 << 20
    q, pool = torch.randn(count, 4, WIDTH), torch.randn(125, 64, WIDTH)
    tables = torch.arange(125, dtype=torch.int32)[None]
    segments = [Segment(0, count, 0, start)]

    def run() -> object:
        return dense_mla(q, pool, tables, Segments.of(segments), value_dim=VALUE, scale=SCALE, workspace=workspace)

    results = count * 4 * (VALUE + 1) * 4
    rows = pool.numel() * 4
    assert peak_memory(run) < workspace + results + rows + (1 << 20)


def test_bad_arguments(scattered_pages: Scatter) -> None:
    q, rows = problem()
    pool, tables = scattered_pages(rows, 8)
    kwargs = {"value_dim": VALUE, "scale": SCALE}
    with pytest.raises(ValueError, match="does not fit pool"):
        dense_mla(q[..., 1:], pool, tables, Segments.of(SEGMENTS), **kwargs)
    with pytest.raises(ValueError, match="torch.float16"):
        dense_mla(q.half(), pool, tables, Segments.of(SEGMENTS), **kwargs)
    with pytest.raises(ValueError, match="have 78 rows, the batch has 77"):
        dense_mla(q[:77], pool, tables, Segments.of(SEGMENTS), **kwargs)
    with pytest.raises(ValueError, match="ends at token 30, its block table holds 2 pages of 8"):
        dense_mla(q, pool, tables[:, :2], Segments.of(SEGMENTS), **kwargs)
