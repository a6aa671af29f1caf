"""Dense causal attention in absorbed form, straight over the paged latent cache.

    out[t, h] = softmax(scale · q[t, h] · row[0 … position of t]ᵀ) · row[…][:value_dim]

For few queries over many cached tokens (decode of sequences that see at most ``index_topk`` tokens, and of models
without an indexer): expanding the cache to per-head keys and values would cost more than it saves.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.paged import read_rows
from dsa_engine.kernels.segment import Segments


def dense_mla_reference(
    q: torch.Tensor, rows: torch.Tensor, start: int, value_dim: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    count, heads, width = q.shape
    rows = rows.float()
    scores = (q.reshape(-1, width).float() @ rows.t()).view(count, heads, -1).mul_(scale)
    future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., start:].masked_fill_(future[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    out = scores.sub_(lse[..., None]).exp_().view(count * heads, -1) @ rows[:, :value_dim]
    return out.view(count, heads, value_dim).to(q.dtype), lse


def dense_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    *,
    value_dim: int,
    scale: float,
    workspace: int = 256 << 20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to all tokens of its sequence up to itself.

    Args:
        q: ``[T, heads, width]`` absorbed queries.
        pool: latent pool ``[pages, page_size, width]``, same dtype as q.
        block_tables: ``[sequences, max_pages]`` int32.
        segments: the runs of queries.
        value_dim: leading columns of a row that are its value.
        scale: softmax scale.
        workspace: bytes for the scores; queries are taken in as many blocks as that needs.

    Returns:
        out ``[T, heads, value_dim]`` in q's dtype; log-sum-exp ``[T, heads]`` float32 (natural logarithm).
    """
    if q.shape[-1] != pool.shape[-1] or q.dtype != pool.dtype:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit pool {pool.dtype} {tuple(pool.shape)}")
    segments.check(q.shape[0], block_tables, pool.shape[1])
    heads = q.shape[1]
    out = torch.empty(q.shape[0], heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    for segment in segments:
        rows = read_rows(pool, block_tables[segment.sequence], 0, segment.end)
        block = max(1, workspace // (8 * heads * segment.end))
        for done in range(0, segment.length, block):
            stop = min(done + block, segment.length)
            part = slice(segment.row + done, segment.row + stop)
            seen = rows[: segment.start + stop]
            out[part], lse[part] = dense_mla_reference(q[part], seen, segment.start + done, value_dim, scale)
    return out, lse
