"""Sparse flash attention over selected rows of the latent cache (absorbed MLA; DeepSeek-V3.2-Exp, equation 2).

    p[t, h] = softmax(scale · q[t, h] · row[slots[t]]ᵀ)      out[t, h] = p[t, h] · row[slots[t]][:value_dim]

A latent row serves as key (whole) and as value (its first ``value_dim`` columns), for all heads. Slot −1 is skipped,
in any place; a query without a single slot yields zeros and a log-sum-exp of −inf.
"""

from __future__ import annotations

import torch

# Gathered rows of one block on a CPU stay within the cache; measured best of 0.5 to 16 MiB.
_CPU_BLOCK_BYTES = 1 << 20


def sparse_attention_reference(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, value_dim: int, scale: float, block_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, width = q.shape
    flat = pool.view(-1, width)
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    block = max(1, block_bytes // (max(1, slots.shape[1]) * 4 * (width + heads)))
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        chosen = slots[part]
        skipped = chosen < 0
        rows = flat[chosen.clamp(min=0)].float()  # [n, k, width]
        if bool(skipped.any()):
            rows.masked_fill_(skipped[..., None], 0.0)  # a row that was never written may hold NaN, and 0 · NaN is NaN
        scores = torch.bmm(q[part].float(), rows.transpose(1, 2)).mul_(scale)  # [n, heads, k]
        scores.masked_fill_(skipped[:, None], float("-inf"))
        lse[part] = torch.logsumexp(scores, dim=-1)
        # An empty row has a log-sum-exp of −inf; 0 in its place makes its probabilities exp(−inf) = 0, not NaN.
        top = lse[part].masked_fill(lse[part] == float("-inf"), 0.0)
        out[part] = torch.bmm(scores.sub_(top[..., None]).exp_(), rows[..., :value_dim])
    return out, lse


def sparse_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    value_dim: int,
    scale: float,
    workspace: int = 256 << 20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to the rows in its slots.

    Args:
        q: ``[T, heads, width]`` absorbed queries.
        pool: latent pool ``[pages, page_size, width]``, same dtype as q.
        slots: ``[T, k]`` int32 rows of the flattened pool, unsorted is fine, −1 skipped.
        value_dim: leading columns of a row that are its value.
        scale: softmax scale.
        workspace: bytes for the gathered rows.

    Returns:
        out ``[T, heads, value_dim]`` in q's dtype; log-sum-exp ``[T, heads]`` float32 (natural logarithm).
    """
    if q.shape[-1] != pool.shape[-1] or q.dtype != pool.dtype:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit pool {pool.dtype} {tuple(pool.shape)}")
    if slots.dim() != 2 or slots.shape[0] != q.shape[0]:
        raise ValueError(f"slots must be [{q.shape[0]}, k], not {tuple(slots.shape)}")
    block_bytes = min(workspace, _CPU_BLOCK_BYTES) if q.device.type == "cpu" else workspace
    return sparse_attention_reference(q, pool, slots, value_dim, scale, block_bytes)
