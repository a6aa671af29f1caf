"""One layer of DSA between its projections: the input of the forms of context parallelism, and their expected result.

A token has queries, a cache row (latent row and index key side by side) and index queries with weights. The result is
its attention output per head. The projections before and after need only a rank's own tokens and are the same in every
form, so they are left out. Every token selects, also one that sees at most ``topk`` tokens (the engine uses dense
attention for those), so that one formula gives the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from zlib import crc32

import torch

from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import IndexKeyFormat, LatentFormat
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import references
from mla.forms import SIZES as MLA_SIZES
from mla.forms import MLASize

PAGE_SIZE = 64
_DRAWN = 512  # tokens per seed


@dataclass(frozen=True)
class DSASize:
    """The sizes of one attention layer and of its indexer."""

    mla: MLASize
    index_heads: int
    index_dim: int
    topk: int

    @property
    def latent(self) -> int:
        """Columns of a latent row."""
        return self.mla.kv_rank + self.mla.rope

    @property
    def cache_row(self) -> int:
        """Columns of a token's cache row: latent row and index key."""
        return self.latent + self.index_dim


SIZES = {
    "v3.2": DSASize(MLA_SIZES["v3.2"], index_heads=64, index_dim=128, topk=2048),
    "small": DSASize(MLASize(512, 16, 192, 128, 32, 16, 32), index_heads=16, index_dim=32, topk=256),
}


@dataclass(frozen=True)
class Tokens:
    """The inputs of a rank's T tokens.

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


@dataclass(frozen=True)
class Cache:
    """Cache rows of a whole sequence in pages: latent pool, index-key pool, and the only row of the block table."""

    latent: torch.Tensor
    index_keys: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def empty(cls, size: DSASize, length: int, dtype: torch.dtype, device: torch.device) -> Cache:
        """Pages in order of position, so that a token's slot is its position."""
        pages = cdiv(length, PAGE_SIZE)
        return cls(
            latent=torch.empty(pages, PAGE_SIZE, size.latent, dtype=dtype, device=device),
            index_keys=torch.empty(pages, PAGE_SIZE, size.index_dim, dtype=dtype, device=device),
            block_tables=torch.arange(pages, dtype=torch.int32, device=device)[None],
        )


class Layer:
    """Weights and random inputs of a layer, equal for the same seed on every rank.

    Args:
        size: sizes of the layer.
        dtype, device: dtype and device of weights and inputs.
        seed: seed of both.
        workspace: bytes for scores.

    Attributes:
        w_uk, w_uv: ``[heads, nope, kv_rank]``, ``[heads, value, kv_rank]``.
    """

    def __init__(
        self, size: DSASize, dtype: torch.dtype, device: torch.device, seed: int = 0, workspace: int = 256 << 20
    ):
        self.size, self.dtype, self.device, self.seed, self.workspace = size, dtype, device, seed, workspace
        mla, generator = size.mla, torch.Generator(device).manual_seed(seed)
        self.latent_format = LatentFormat(mla.kv_rank, mla.rope, dtype)
        self.key_format = IndexKeyFormat(size.index_dim, dtype)
        self.w_uk, self.w_uv = (
            torch.randn(mla.heads, rows, mla.kv_rank, generator=generator, dtype=dtype, device=device).mul_(scale)
            for rows, scale in ((mla.nope, mla.kv_rank**-0.5), (mla.value, mla.kv_rank**-0.5))
        )

    def tokens(self, segments: Sequence[tuple[int, int]]) -> Tokens:
        """Inputs at the positions in ``segments``, pairs of first position and count."""
        size, mla = self.size, self.size.mla
        weights = self._draw(2, segments, torch.float32, size.index_heads)
        return Tokens(
            q=self._draw(0, segments, self.dtype, mla.heads, mla.nope + mla.rope),
            cache_rows=self.cache_rows(segments),
            index_q=self._draw(1, segments, self.dtype, size.index_heads, size.index_dim),
            index_weights=weights * (size.index_heads * size.index_dim) ** -0.5,
        )

    def cache_rows(self, segments: Sequence[tuple[int, int]]) -> torch.Tensor:
        """``[T, latent + index_dim]``."""
        return self._draw(3, segments, self.dtype, self.size.cache_row)

    def absorb(self, q: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """``[T, heads, nope + rope]`` to ``[T, heads, latent]``, to be multiplied with latent rows. ``heads``: those of
        q."""
        nope, rank = self.size.mla.nope, self.size.mla.kv_rank
        absorbed = q.new_empty(*q.shape[:2], self.size.latent)
        torch.bmm(q[..., :nope].transpose(0, 1), self.w_uk[heads], out=absorbed[..., :rank].transpose(0, 1))
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def attend(self, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Attention ``[T, heads, kv_rank]`` of absorbed queries over the latent rows in their slots."""
        mla = self.size.mla
        return sparse_attention(
            q, pool, slots, row_format=self.latent_format, scale=mla.scale, workspace=self.workspace
        )[0]

    def values(self, out_latent: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """``[T, heads, kv_rank]`` to ``[T, heads, value]``."""
        return torch.bmm(out_latent.transpose(0, 1), self.w_uv[heads].transpose(1, 2)).transpose(0, 1)

    def select(self, tokens: Tokens, segments: Segments, cache: Cache) -> torch.Tensor:
        """Slots ``[T, topk]`` int32 that the tokens attend to, −1 after the last. In :class:`Cache` a slot is a
        position.

        On a CPU every form uses the reference, from scores: the engine's C++ kernel returns none, and a ring has to
        merge them. The study compares divisions, not kernels."""
        with references() if self.device.type == "cpu" else nullcontext():
            return lightning_indexer(
                tokens.index_q, tokens.index_weights, cache.index_keys, cache.block_tables, segments, self.size.topk,
                key_format=self.key_format, workspace=self.workspace,
            )  # fmt: skip

    def single_process(self, segments: Sequence[tuple[int, int]], length: int) -> torch.Tensor:
        """``[T, heads, value]`` of the positions in ``segments``, from a cache of all ``length`` tokens: the expected
        result of every form. Nothing is sent."""
        cache, tokens = Cache.empty(self.size, length, self.dtype, self.device), self.tokens(segments)
        rows, latent = self.cache_rows([(0, length)]), self.size.latent
        cache.latent.view(-1, latent)[:length] = rows[:, :latent]
        cache.index_keys.view(-1, self.size.index_dim)[:length] = rows[:, latent:]
        slots = self.select(tokens, as_segments(segments, self.device), cache)
        return self.values(self.attend(self.absorb(tokens.q), cache.latent, slots))

    def _draw(self, what: int, segments: Sequence[tuple[int, int]], dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Normally distributed rows of the positions in ``segments``; a row depends on its position alone."""
        generator = torch.Generator(self.device)
        parts = [torch.empty(0, *shape, dtype=dtype, device=self.device)]
        for start, count in segments:
            for block in range(start // _DRAWN, cdiv(start + count, _DRAWN)):
                generator.manual_seed(crc32(f"{self.seed} {what} {block}".encode()))  # a CPU's takes 32 bits
                drawn = torch.randn(_DRAWN, *shape, generator=generator, dtype=dtype, device=self.device)
                first = block * _DRAWN
                parts.append(drawn[max(start - first, 0) : start + count - first])
        return torch.cat(parts)


def as_segments(segments: Sequence[tuple[int, int]], device: torch.device) -> Segments:
    """Segments of a rank's tokens for the kernels: consecutive rows, all of the single sequence."""
    row, made = 0, []
    for start, count in segments:
        made.append(Segment(row, count, 0, start))
        row += count
    return Segments.of(made, device)
