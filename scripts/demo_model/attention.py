"""Attention for training: dense, or over the tokens that the indexer selects, with the indexer's loss.

Lightning indexer and its training: DeepSeek-V3.2-Exp, section 2.1, equations 1 to 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dsa_engine.config.model import ModelConfig

INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Mode:
    """The way in which attention is computed.

    Attributes:
        kind: "dense" (no indexer), "warmup" (dense, the indexer learns from all tokens that a query sees) or "sparse"
            (the ``topk`` best tokens of the indexer, which learns on these only).
        topk: number of tokens that a query attends to in "sparse".
        rows: number of queries of a block.
        recompute: compute blocks again in the backward pass instead of storing them.
    """

    kind: str = "dense"
    topk: int = 0
    rows: int = 256
    recompute: bool = False

    @property
    def uses_indexer(self) -> bool:
        return self.kind != "dense"


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of ``x [B, L, heads, dim]`` on pairs (2i, 2i + 1), as in MLA; ``cos, sin [B, L, 1, dim / 2]``."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of ``x`` on pairs (i, i + dim / 2), as in the indexer."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Indexer(nn.Module):
    """Projections of the lightning indexer: queries, one key per token, and the weights of the heads."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=INDEX_NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)

    def forward(
        self, x: torch.Tensor, q_resid: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[B, L, heads, dim]``, keys ``[B, L, dim]``, weights ``[B, L, heads]`` with all scales included."""
        config = self.config
        rope = config.qk_rope_head_dim
        q = self.wq_b(q_resid).unflatten(-1, (config.index_n_heads, config.index_head_dim))
        k = self.k_norm(self.wk(x).to(self.k_norm.weight.dtype))[:, :, None]
        q = torch.cat((rotate_halves(q[..., :rope], cos, sin).to(q.dtype), q[..., rope:]), dim=-1)
        k = torch.cat((rotate_halves(k[..., :rope], cos, sin), k[..., rope:]), dim=-1)
        with torch.autocast("cpu", enabled=False):
            weights = self.weights_proj(x.to(self.weights_proj.weight.dtype))
        weights = weights * (config.index_n_heads**-0.5 * config.index_head_dim**-0.5)
        return q, k.squeeze(2), weights


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    mode: Mode,
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
    for first in range(0, length, mode.rows):
        last = min(first + mode.rows, length)
        if mode.recompute:
            out, loss = checkpoint(_block, q, k, v, scale, *index, mode, first, last, use_reentrant=False)
        else:
            out, loss = _block(q, k, v, scale, *index, mode, first, last)
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
    length = q.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
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
