"""Sparse attention against a softmax over lists, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from dsa_engine.kernels.sparse_attention import sparse_attention

SCALE = 0.37


def naive(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = pool.reshape(-1, pool.shape[-1]).double()
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t, chosen in enumerate(slots.tolist()):
        kept = [s for s in chosen if s >= 0]
        for h in range(q.shape[1] if kept else 0):
            scores = rows[kept] @ q[t, h].double() * SCALE
            lse[t, h] = scores.exp().sum().log()
            out[t, h] = (scores.exp()[:, None] * rows[kept, :value_dim]).sum(0) / scores.exp().sum()
    return out, lse


def problem(tokens: int, heads: int, width: int, k: int, seed: int = 0) -> list[torch.Tensor]:
    """Slots in no order, −1 scattered among them, the second token without any."""
    g = torch.Generator().manual_seed(seed)
    q, pool = torch.randn(tokens, heads, width, generator=g), torch.randn(9, 13, width, generator=g)
    slots = torch.stack([torch.randperm(9 * 13, generator=g)[:k] for _ in range(tokens)]).int()
    slots[torch.rand(slots.shape, generator=g) < 0.2] = -1
    slots[1:2] = -1
    return [q, pool, slots]


@pytest.mark.parametrize("workspace", [1, 30_000, 256 << 20])
@pytest.mark.parametrize(
    "tokens, heads, width, value_dim, k",
    [(1, 1, 4, 4, 1), (1, 5, 40, 32, 100), (37, 3, 24, 16, 33), (64, 8, 12, 12, 64), (3, 7, 10, 3, 117)],
)
def test_against_lists(tokens: int, heads: int, width: int, value_dim: int, k: int, workspace: int) -> None:
    q, pool, slots = problem(tokens, heads, width, k)
    out, lse = sparse_attention(q, pool, slots, value_dim=value_dim, scale=SCALE, workspace=workspace)
    expected, expected_lse = naive(q, pool, slots, value_dim)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    if tokens > 1:
        assert not out[1].any() and bool((lse[1] == -math.inf).all())


def test_unread_rows_do_not_matter() -> None:
    """What lies in rows without a slot, row 0 above all, has no influence, however large."""
    q, pool, slots = problem(5, 3, 8, 20)
    slots[slots == 0] = -1
    read = torch.zeros(9 * 13, dtype=torch.bool)
    read[slots[slots >= 0].long()] = True
    out, lse = sparse_attention(q, pool, slots, value_dim=6, scale=SCALE)
    pool.view(-1, 8)[~read] = 1e30
    again, lse_again = sparse_attention(q, pool, slots, value_dim=6, scale=SCALE)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_large_scores_do_not_overflow() -> None:
    q, pool, slots = problem(4, 2, 8, 20)
    out, lse = sparse_attention(q * 1e3, pool, slots, value_dim=8, scale=1.0)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse[[0, 2, 3]]).all())


def test_results_of_two_halves_merge_by_their_log_sum_exp() -> None:
    """What the log-sum-exp is for: attention over two sets of rows makes attention over both."""
    q, pool, slots = problem(6, 3, 16, 50, seed=3)
    whole, _ = sparse_attention(q, pool, slots, value_dim=16, scale=SCALE)
    parts = [sparse_attention(q, pool, s, value_dim=16, scale=SCALE) for s in (slots[:, :21], slots[:, 21:])]
    share = torch.stack([lse for _, lse in parts]).softmax(dim=0).nan_to_num()  # the token without slots: −inf twice
    merged = sum(w[..., None] * out for w, (out, _) in zip(share, parts, strict=True))
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    q, pool, slots = problem(20, 4, 24, 40)
    q, pool = q.to(dtype), pool.to(dtype)
    out, _ = sparse_attention(q, pool, slots, value_dim=16, scale=SCALE)
    expected, _ = naive(q, pool, slots, 16)
    assert out.dtype == dtype
    assert float((out.double() - expected).norm() / expected.norm()) < bound


def test_bad_arguments() -> None:
    q, pool, slots = problem(4, 2, 8, 5)
    kwargs = {"value_dim": 8, "scale": 1.0}
    with pytest.raises(ValueError, match="does not fit pool"):
        sparse_attention(q[..., :7], pool, slots, **kwargs)
    with pytest.raises(ValueError, match=r"q torch.float32 .* does not fit pool torch.float16"):
        sparse_attention(q, pool.half(), slots, **kwargs)
    with pytest.raises(ValueError, match=r"slots must be \[4, k\], not \(3, 5\)"):
        sparse_attention(q, pool, slots[:3], **kwargs)
    with pytest.raises(ValueError, match=r"slots must be \[4, k\], not \(4, 1, 5\)"):
        sparse_attention(q, pool, slots[:, None], **kwargs)
