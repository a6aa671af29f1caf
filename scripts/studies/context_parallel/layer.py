"""One layer of DSA between its projections: the input of the forms of context parallelism, and their expected result.

The projections before and after need only a rank's own tokens and are the same in every form, so they are left out.
Every token selects, also one that sees at most ``topk`` tokens (the engine uses dense attention for those).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import index_key_format, latent_format
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import references
from dsa_engine.parallel.context_parallel import pieces_of

PAGE_SIZE = 64
WORKSPACE = 256 << 20  # bytes of scores at a time
CpLayout = Literal["head_tail", "contiguous"]


class Size(NamedTuple):
    """The sizes of one attention layer and of its indexer; a head's query has the parts ``nope`` and ``rope``."""

    heads: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    index_heads: int
    index_dim: int
    topk: int

    @property
    def latent(self) -> int:
        """Columns of a latent row."""
        return self.kv_rank + self.rope


SIZES = {"v3.2": Size(128, 512, 128, 64, 128, 64, 128, 2048), "small": Size(16, 128, 32, 16, 32, 16, 32, 256)}


def split_sequence(start: int, length: int, ranks: int, layout: CpLayout = "head_tail") -> list[list[tuple[int, int]]]:
    """The pieces ``(start, length)`` of every rank: as the engine divides a sequence, or one after the other; empty
    ones are omitted."""
    if layout == "contiguous":
        counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
        stops = [start + stop for stop in accumulate(counts)]
        return [[(stop - n, n)] * (n > 0) for n, stop in zip(counts, stops, strict=True)]
    one_each, index = torch.ones(ranks, dtype=torch.int64), torch.arange(ranks)
    starts, lengths = pieces_of(start * one_each, length * one_each, index, ranks * one_each)
    of_ranks = (zip(*pair, strict=True) for pair in zip(starts.tolist(), lengths.tolist(), strict=True))
    return [[piece for piece in pieces if piece[1]] for pieces in of_ranks]


@dataclass(frozen=True)
class Division:
    """``length`` tokens over ``ranks``, in a layout of :func:`split_sequence`."""

    length: int
    ranks: int
    layout: CpLayout

    @cached_property
    def positions(self) -> list[torch.Tensor]:
        """Positions of each rank's tokens, ascending."""
        parts = split_sequence(0, self.length, self.ranks, self.layout)
        return [torch.cat([torch.arange(a, a + n) for a, n in part] or [torch.arange(0)]) for part in parts]

    @cached_property
    def rows(self) -> int:
        """Rows of each rank in a collective, padding included."""
        return max(map(len, self.positions))

    def work(self, rank: int, size: Size) -> float:
        """Operations of a rank that scores and attends for its own tokens: two for a multiply-add."""
        visible = self.positions[rank] + 1
        scored = int(visible.sum()) * size.index_heads * size.index_dim
        return 2.0 * (scored + int(visible.clamp(max=size.topk).sum()) * size.heads * (size.latent + size.kv_rank))


class Tokens(NamedTuple):
    """Inputs of T tokens.

    Attributes:
        q: ``[T, heads, nope + rope]``, rotated, W_UK not yet absorbed.
        cache_rows: ``[T, latent + index_dim]``.
        index_q: ``[T, index_heads, index_dim]``.
        index_weights: ``[T, index_heads]`` float32, all scales included.
    """

    q: torch.Tensor
    cache_rows: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor

    def at(self, positions: torch.Tensor) -> Tokens:
        return Tokens(*(tensor[positions.to(tensor.device)] for tensor in self))


class Layer:
    """Weights of one layer, and what every form does with them; with the same ``seed`` all ranks have the same."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, seed: int = 0):
        self.size, self.dtype, self.device, self.seed = size, dtype, device, seed
        self.latent_format = latent_format(size.kv_rank, size.rope, dtype)
        self.key_format = index_key_format(size.index_dim, dtype)
        self.w_uk = self._randn(size.heads, size.nope, size.kv_rank) * size.kv_rank**-0.5
        self.w_uv = self._randn(size.heads, size.value, size.kv_rank, more=1) * size.kv_rank**-0.5

    def _randn(self, *shape: int, more: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(10 * self.seed + more)
        return torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)

    def tokens(self, length: int) -> Tokens:
        """The tokens of a whole sequence."""
        size = self.size
        weights = self._randn(length, size.index_heads, more=5).float()
        return Tokens(
            self._randn(length, size.heads, size.nope + size.rope, more=2),
            self._randn(length, size.latent + size.index_dim, more=3),
            self._randn(length, size.index_heads, size.index_dim, more=4),
            weights * (size.index_heads * size.index_dim) ** -0.5,
        )

    def absorb(self, q: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Queries ``[T, heads, nope + rope]`` of ``heads`` to ``[T, heads, latent]``, for latent rows."""
        nope = self.size.nope
        absorbed = torch.bmm(q[..., :nope].transpose(0, 1), self.w_uk[heads]).transpose(0, 1)
        return torch.cat((absorbed, q[..., nope:]), dim=-1)

    def attend(self, q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention ``[T, heads, kv_rank]`` of absorbed queries over latent rows ``[pages, page_size, latent]`` in
        ``slots [T, n]``, and its log-sum-exp ``[T, heads]``."""
        scale = (self.size.nope + self.size.rope) ** -0.5
        return sparse_attention(q, rows, slots, row_format=self.latent_format, scale=scale, workspace=WORKSPACE)

    def values(self, out_latent: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """``[T, heads, kv_rank]`` to ``[T, heads, value]``."""
        return torch.bmm(out_latent.transpose(0, 1), self.w_uv[heads].transpose(1, 2)).transpose(0, 1)

    def cache(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pools of latent rows and of index keys with cache rows ``[n, latent + index_dim]`` at their positions; −1:
        padding. A token's slot is its position."""
        pages = cdiv(int(positions.max()) + 1, PAGE_SIZE)
        latent, keys = (rows.new_zeros(pages, PAGE_SIZE, n) for n in (self.size.latent, self.size.index_dim))
        store_cache_rows(latent, keys, rows, positions.int().to(rows.device), self.key_format)
        return latent, keys

    def select(self, tokens: Tokens, positions: torch.Tensor, index_keys: torch.Tensor) -> torch.Tensor:
        """Slots ``[T, topk]`` int32 that tokens at ``positions`` attend to, −1 after the last.

        On a CPU every form uses the reference: the engine's C++ kernel returns no scores, and a ring has to merge them.
        """
        starts = [0, *(torch.diff(positions) != 1).nonzero().flatten().add(1).tolist(), len(positions)]
        spans = [(row, end - row) for row, end in zip(starts, starts[1:]) if end > row]
        segments = Segments.of((Segment(row, n, 0, int(positions[row])) for row, n in spans), self.device)
        table = torch.arange(len(index_keys), dtype=torch.int32, device=self.device)[None]
        q, weights, k, form = tokens.index_q, tokens.index_weights, self.size.topk, self.key_format
        with references() if self.device.type == "cpu" else nullcontext():
            return lightning_indexer(q, weights, index_keys, table, segments, k, key_format=form, workspace=WORKSPACE)

    def single_process(self, whole: Tokens, positions: torch.Tensor) -> torch.Tensor:
        """``[T, heads, value]`` at ``positions``, from a cache of all tokens: the expected result of every form."""
        latent, keys = self.cache(whole.cache_rows, torch.arange(len(whole.q)))
        tokens = whole.at(positions)
        slots = self.select(tokens, positions, keys)
        return self.values(self.attend(self.absorb(tokens.q), latent, slots)[0])
