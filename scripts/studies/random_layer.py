"""One attention layer of :mod:`dsa_engine.reference.dsa` with random weights, on which the studies of MLA and of
context parallelism stand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_engine.reference import dsa

Tokens = tuple[Tensor, ...]  # of T tokens, see Layer.tokens


class Size(NamedTuple):
    """The sizes of one layer and of its indexer; a head's query has the parts ``nope`` and ``rope``."""

    heads: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    index_heads: int = 64
    index_dim: int = 128
    topk: int = 2048
    q_rank: int = 1536
    hidden: int = 7168

    def config(self) -> dsa.Config:
        """What the reference's attention reads of a configuration: plain RoPE, no experts."""
        given: dict[str, Any] = {"vocab_size": 0, "num_hidden_layers": 1, "routed_scaling_factor": 1.0, "rope": {}}
        given |= {"n_routed_experts": 0, "num_experts_per_tok": 0, "n_group": 1, "topk_group": 1}
        given |= {"q_lora_rank": self.q_rank, "kv_lora_rank": self.kv_rank, "num_attention_heads": self.heads}
        return dsa.Config(**given, qk_nope_head_dim=self.nope, qk_rope_head_dim=self.rope)

    def weights(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dsa.Weights:
        """Normally distributed, scaled so that results stay near 1; the same on all ranks; on "meta" only shapes."""
        torch.manual_seed(seed)
        shapes = {
            "q_b_proj": (self.heads * (self.nope + self.rope), self.q_rank),
            "kv_b_proj": (self.heads * (self.nope + self.value), self.kv_rank),
            "o_proj": (self.hidden, self.heads * self.value),
        }
        made = {name: torch.randn(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        return dsa.Weights({name: values * values.shape[1] ** -0.5 for name, values in made.items()})


SIZES = {
    "v3.2": Size(128, 512, 128, 64, 128),
    "small": Size(16, 128, 32, 16, 32, index_heads=16, index_dim=32, topk=256),
}


class Layer:
    """The weights of attention; with the same ``seed`` all ranks have the same."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device | str, seed: int = 0):
        self.size, self.c, self.seed, self.latent = size, size.config(), seed, size.kv_rank + size.rope
        self.w_uk, self.w_uv = dsa.up_projections(size.weights(dtype, device, seed), self.c)

    def tokens(self, length: int, last: int | None = None) -> Tokens:
        """Of a whole sequence, or queries of its ``last`` tokens only: ``q [T, heads, nope + rope]``, rotated, W_UK not
        yet absorbed; ``rows [length, latent + index_dim]`` of the caches; ``index_q [T, index_heads, index_dim]``;
        float32 ``weights [T, index_heads]``."""
        s, like, queries = self.size, self.w_uk, length if last is None else last
        shapes = (
            (queries, s.heads, s.nope + s.rope),
            (length, self.latent + s.index_dim),
            (queries, s.index_heads, s.index_dim),
            (queries, s.index_heads),
        )
        torch.manual_seed(self.seed + 1)
        *others, weights = (torch.randn(shape, dtype=like.dtype, device=like.device) for shape in shapes)
        return *others, weights.float() * (s.index_heads * s.index_dim) ** -0.5

    def absorb(self, q: Tensor, heads: slice = slice(None)) -> Tensor:
        """Queries ``[T, heads, nope + rope]`` of ``heads`` to ``[T, heads, latent]``, for latent rows."""
        plain, rotated = q.split((self.size.nope, self.size.rope), -1)
        return torch.cat((torch.einsum("thd,hdr->thr", plain, self.w_uk[heads]), rotated), -1)

    def values(self, summed: Tensor, heads: slice = slice(None)) -> Tensor:
        """``[T, heads, kv_rank]`` to ``[T, heads, value]``."""
        return torch.einsum("thr,hvr->thv", summed, self.w_uv[heads])

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[n, heads, nope + rope]`` and values ``[n, heads, value]`` of cache rows."""
        latent, rotated, _ = rows.split((self.size.kv_rank, self.size.rope, self.size.index_dim), 1)
        plain = torch.einsum("nr,hdr->nhd", latent, self.w_uk)
        keys = torch.cat((plain, rotated[:, None].expand(-1, self.size.heads, -1)), -1)
        return keys, torch.einsum("nr,hvr->nhv", latent, self.w_uv)

    def select(self, tokens: Tokens) -> Tensor:
        """Positions ``[T, topk]`` that the reference selects for ``q``'s tokens, the last ones of a sequence."""
        _, rows, index_q, weights = tokens
        return dsa.select(index_q, weights, rows[:, self.latent :], positions(tokens), self.size.topk)

    def absorbed(self, tokens: Tokens, chosen: Tensor | None) -> Tensor:
        """``[T, heads, value]``: the reference's attention over latent rows that were chosen, or all."""
        q, rows, *_ = tokens
        latent, rank, scale = rows[:, : self.latent], self.size.kv_rank, self.c.softmax_scale
        return self.values(dsa.attend(self.absorb(q), latent, positions(tokens), chosen, rank, scale)[0])


def positions(tokens: Tokens) -> Tensor:
    """Those of the queries: the last of the sequence, if they are fewer than its rows."""
    q, rows, *_ = tokens
    return torch.arange(len(rows) - len(q), len(rows), device=q.device)
