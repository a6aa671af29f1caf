"""Forms of Multi-head Latent Attention (DeepSeek-V2, section 2.1): the same attention over the same weights, with
different caches and products. One new token per sequence, as in decode.

CD        caches keys and values of every head, decompressed: plain multi-head attention
CC        caches the latent row and the rotated key part, and decompresses both in every step
A_CC      the same cache; W_UK absorbed into the query, W_UV after the sum: attention over latent rows, whose two parts
          are first copied into one
A_CC_ME   the same without the copy: two products whose scores are added ("move elision")
AM_CC_ME  the same with W_UQ · W_UK and W_UV · W_O multiplied beforehand
engine    both parts in one row of a paged pool; absorbed

The five names are those of the published study of these forms with DeepSeek-V2's sizes (MADSys group, Tsinghua
University, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.kernels.rows.rope import apply_rope
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.integers import cdiv

PAGE_SIZE = 64


class MLASize(NamedTuple):
    """The sizes of one attention layer; ``nope`` and ``rope`` are the two parts of a head's query."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


SIZES = {"v2": MLASize(5120, 128, 1536, 512, 128, 64, 128), "v3.2": MLASize(7168, 128, 1536, 512, 128, 64, 128)}


@dataclass(frozen=True)
class MLAWeights:
    """The weights of one layer after the two down projections.

    Attributes:
        uq, qr: ``[heads, nope, q_rank]``, ``[heads, rope, q_rank]``: queries from the query's latent row.
        uk, uv: ``[heads, nope, kv_rank]``, ``[heads, value, kv_rank]``: keys and values from a cached latent row.
        o: ``[heads, value, hidden]``.
    """

    size: MLASize
    uq: torch.Tensor
    qr: torch.Tensor
    uk: torch.Tensor
    uv: torch.Tensor
    o: torch.Tensor

    @classmethod
    def random(cls, size: MLASize, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> MLAWeights:
        """Normally distributed weights, scaled so that results stay near 1; on "meta" only their shapes."""
        shapes = {
            "uq": (size.heads, size.nope, size.q_rank),
            "qr": (size.heads, size.rope, size.q_rank),
            "uk": (size.heads, size.nope, size.kv_rank),
            "uv": (size.heads, size.value, size.kv_rank),
            "o": (size.heads, size.value, size.hidden),
        }
        torch.manual_seed(seed)
        inputs = {name: shape[-1] for name, shape in shapes.items()} | {"o": size.heads * size.value}
        drawn = {name: torch.randn(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        return cls(size, **{name: values * inputs[name] ** -0.5 for name, values in drawn.items()})


Cache = tuple[Any, ...]  # tensors; of the engine also the segments of the queries


class MLAForm:
    """One way to compute the attention; ``weights`` are the tensors that a step reads."""

    name: str

    def __init__(self, w: MLAWeights):
        self.size, self.scale = w.size, (w.size.nope + w.size.rope) ** -0.5
        self.uq, self.qr, self.uk, self.uv, self.out = w.uq, w.qr, w.uk, w.uv, w.o.flatten(0, 1)
        self.weights: tuple[torch.Tensor, ...] = (w.uq, w.qr, w.uk, w.uv, w.o)

    def cache(self, latent: torch.Tensor, rotated: torch.Tensor) -> Cache:
        """This form's cache for ``latent [B, S, kv_rank]`` and ``rotated [B, S, rope]``."""
        return latent.clone(), rotated.clone()

    def decode(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The layer's output ``[B, hidden]`` for ``q_latent [B, q_rank]`` over all cached tokens."""
        raise NotImplementedError

    def rotated_query(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[B, heads, rope]``, turned by ``cos, sin [B, rope / 2]``."""
        q = _per_head(q_latent, self.qr)
        return q if q.is_meta else apply_rope(q, cos, sin, interleaved=True)


def _per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[B, heads, rows]``: x ``[B, columns]`` through the weight ``[heads, rows, columns]`` of every head."""
    heads, rows, columns = weight.shape
    return (x @ weight.view(heads * rows, columns).t()).view(-1, heads, rows)


def _through(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``[B, heads, columns]``: each head's x ``[B, heads, rows]`` times its weight ``[heads, rows, columns]``."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


class CacheCompressed(MLAForm):
    """Attention over the keys ``[B, heads, S, nope + rope]`` and values ``[B, heads, S, value]`` of every head."""

    name = "CC"

    def decompress(self, latent: torch.Tensor, rotated: torch.Tensor) -> Cache:
        batch, count, _ = latent.shape
        heads = self.size.heads
        rows = latent.reshape(batch * count, -1)
        keys = latent.new_empty(batch, heads, count, self.size.nope + self.size.rope)
        keys[..., : self.size.nope] = _per_head(rows, self.uk).view(batch, count, heads, -1).transpose(1, 2)
        keys[..., self.size.nope :] = rotated[:, None]
        return keys, _per_head(rows, self.uv).view(batch, count, heads, -1).transpose(1, 2).contiguous()

    def attend(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        keys, values = cache
        q = torch.cat((_per_head(q_latent, self.uq), self.rotated_query(q_latent, cos, sin)), dim=-1)
        scores = (keys @ q[..., None])[..., 0] * self.scale
        out = (scores.softmax(dim=-1)[:, :, None] @ values)[:, :, 0]
        return out.flatten(1) @ self.out

    def decode(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        return self.attend(q_latent, cos, sin, self.decompress(*cache))


class CacheDecompressed(CacheCompressed):
    name = "CD"

    def __init__(self, w: MLAWeights):
        super().__init__(w)
        self.weights = (w.uq, w.qr, w.o)  # the other two are needed once per token, not in every step

    def cache(self, latent: torch.Tensor, rotated: torch.Tensor) -> Cache:
        return self.decompress(latent, rotated)

    def decode(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        return self.attend(q_latent, cos, sin, cache)


class Absorbed(MLAForm):
    name = "A_CC"

    def absorbed_query(self, q_latent: torch.Tensor) -> torch.Tensor:
        """``[B, heads, kv_rank]``, to be multiplied with latent rows."""
        return _through(_per_head(q_latent, self.uq), self.uk)

    def project(self, summed: torch.Tensor) -> torch.Tensor:
        """``[B, hidden]`` of the weighted latent rows ``[B, heads, kv_rank]``."""
        return _through(summed, self.uv.transpose(1, 2)).flatten(1) @ self.out

    def decode(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        latent, rotated = cache
        q = torch.cat((self.absorbed_query(q_latent), self.rotated_query(q_latent, cos, sin)), dim=-1)
        rows = torch.cat((latent, rotated), dim=-1)
        scores = q @ rows.transpose(1, 2) * self.scale
        return self.project(scores.softmax(dim=-1) @ latent)


class AbsorbedMoveElision(Absorbed):
    name = "A_CC_ME"

    def decode(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        latent, rotated = cache
        scores = self.absorbed_query(q_latent) @ latent.transpose(1, 2)
        scores += self.rotated_query(q_latent, cos, sin) @ rotated.transpose(1, 2)
        return self.project((scores * self.scale).softmax(dim=-1) @ latent)


class AbsorbedMaterialized(AbsorbedMoveElision):
    name = "AM_CC_ME"

    def __init__(self, weights: MLAWeights):
        super().__init__(weights)
        self.q_absorbed = torch.bmm(weights.uk.transpose(1, 2), weights.uq)  # [heads, kv_rank, q_rank]
        self.o_absorbed = torch.bmm(weights.uv.transpose(1, 2), weights.o).flatten(0, 1)  # [heads * kv_rank, hidden]
        self.weights = (self.q_absorbed, self.qr, self.o_absorbed)

    def absorbed_query(self, q_latent: torch.Tensor) -> torch.Tensor:
        return _per_head(q_latent, self.q_absorbed)

    def project(self, summed: torch.Tensor) -> torch.Tensor:
        return summed.flatten(1) @ self.o_absorbed


class EngineForm(Absorbed):
    """The engine's :func:`~dsa_engine.kernels.attention.dense_mla.dense_mla`; on a CPU its reference."""

    name = "engine"

    def cache(self, latent: torch.Tensor, rotated: torch.Tensor) -> Cache:
        batch, count, _ = latent.shape
        pages = cdiv(count, PAGE_SIZE)
        pool = latent.new_zeros(batch * pages, PAGE_SIZE, self.size.kv_rank + self.size.rope)
        rows = pool.view(batch, pages * PAGE_SIZE, -1)[:, :count]
        rows[..., : self.size.kv_rank], rows[..., self.size.kv_rank :] = latent, rotated
        tables = torch.arange(batch * pages, dtype=torch.int32, device=latent.device).view(batch, pages)
        last = Segments.of((Segment(i, 1, i, count - 1) for i in range(batch)), latent.device)
        return pool, tables, last

    def decode(self, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        q = torch.cat((self.absorbed_query(q_latent), self.rotated_query(q_latent, cos, sin)), dim=-1)
        row_format = latent_format(self.size.kv_rank, self.size.rope, q.dtype)
        out, _ = dense_mla(q, *cache, row_format=row_format, scale=self.scale)
        return self.project(out)


FORMS: tuple[type[MLAForm], ...] = (
    CacheDecompressed,
    CacheCompressed,
    Absorbed,
    AbsorbedMoveElision,
    AbsorbedMaterialized,
    EngineForm,
)
