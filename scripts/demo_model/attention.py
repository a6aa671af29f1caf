"""Attention for training: dense, or over the tokens that the indexer selects, with the indexer's loss.

Lightning indexer and its training: DeepSeek-V3.2-Exp, section 2.1, equations 1 to 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROWS = 256  # queries of a block
KEEP_BLOCKS = 2048  # tokens of a document above which the backward pass computes blocks again instead of storing them
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the indexer's queries, keys and weights of heads


@dataclass(frozen=True)
class Mode:
    """The way in which attention is computed.

    Attributes:
        kind: "dense" (no indexer), "warmup" (dense, the indexer learns from all tokens that a query sees) or "sparse"
            (the ``topk`` best tokens of the indexer, which learns on these only).
        topk: number of tokens that a query attends to in "sparse".
    """

    kind: str = "dense"
    topk: int = 0


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, index: Projections | None, mode: Mode
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention, ``q, k [B, heads, L, qk]`` and ``v [B, heads, L, value]`` to ``[B, heads, L, value]``.

    Returns:
        the result and the indexer's loss, the mean over all queries; None without one.
    """
    if index is None:
        width = q.shape[-1] - v.shape[-1]  # the fused kernel needs values as wide as keys
        padded = F.pad(v, (0, width)) if width > 0 else v
        out = F.scaled_dot_product_attention(q, k, padded, is_causal=True, scale=scale)
        return out[..., : v.shape[-1]], None
    length, parts, losses = q.shape[2], [], []
    for first in range(0, length, ROWS):
        block = (q, k, v, scale, *index, mode, first, min(first + ROWS, length))
        out, loss = checkpoint(_block, *block, use_reentrant=False) if length > KEEP_BLOCKS else _block(*block)
        parts.append(out)
        losses.append(loss)
    return torch.cat(parts, dim=2), torch.stack(losses).sum() / (q.shape[0] * length)


def guide_loss(q: torch.Tensor, k: torch.Tensor, scale: float, targets: dict[int, torch.Tensor]) -> torch.Tensor:
    """Loss of heads that should attend to one given token each: the mean of ``-log attention[t, target[t]]``.

    Args:
        q, k: ``[B, heads, L, dim]``.
        scale: scale of the softmax.
        targets: by head, the token ``[B, L]`` that each query should attend to, at or before the query; -1: any.
    """
    heads, wanted = list(targets), torch.stack(list(targets.values()), dim=1)
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu_(1)
    logits = torch.matmul(q[:, heads] * scale, k[:, heads].transpose(2, 3)).masked_fill(future, float("-inf"))
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=-1)


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Equation 1: ``I[t, s] = sum over heads h of w[t, h] relu(q[t, h] . k[s])``, ``[B, queries, keys]``."""
    batch, queries, heads, dim = q.shape
    products = torch.matmul(q.reshape(batch, queries * heads, dim), k.to(q.dtype).transpose(1, 2))
    scores = F.relu(products).view(batch, queries, heads, -1)
    return torch.matmul(weights[:, :, None].to(scores.dtype), scores).squeeze(2).to(weights.dtype)


def _block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    mode: Mode,
    first: int,
    last: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries ``[first, last)``: their attention, and the sum of their indexer losses."""
    future = torch.ones(last - first, last, dtype=torch.bool).triu_(first + 1)
    scores = index_scores(index_q[:, first:last], index_k[:, :last], index_weights[:, first:last])
    closed = future.expand_as(scores)
    if mode.kind == "sparse" and last > mode.topk:
        chosen = scores.detach().masked_fill(closed, float("-inf")).topk(mode.topk, dim=-1).indices
        closed = torch.ones_like(closed).scatter_(2, chosen, False) | closed
    logits = torch.matmul(q[:, :, first:last] * scale, k[:, :, :last].transpose(2, 3))
    attention = logits.masked_fill(closed[:, None], float("-inf")).softmax(dim=-1, dtype=index_weights.dtype)
    out = torch.matmul(attention.to(v.dtype), v[:, :, :last])
    # Equations 3 and 4: KL(p || softmax(I)), where p is the heads' attention, summed and normalised, without gradient.
    target = attention.detach().mean(dim=1)
    log_index = scores.masked_fill(closed, float("-inf")).log_softmax(dim=-1).masked_fill(closed, 0.0)
    loss = torch.xlogy(target, target).sum() - (target * log_index).sum()
    return out, loss
