"""The FP8 cache formats, which other kernels of the field use too. Both pools are uint8.

    latent row   [rank e4m3 | rank/128 float32 scales | rope bfloat16]      656 bytes for 512 + 64
    index keys   of one page: page_size · dim e4m3, then page_size float32 scales      132 bytes a key for 128

A scale belongs to 128 values of a latent row, and to a whole index key: ``value = e4m3 · scale``. The rotated part of a
latent row stays in bfloat16. A row of the index-key pool ``[pages, page_size, dim + 4]`` is no key: values of all keys
of a page lie before their scales.

These functions define the formats and serve :mod:`.cache_format`; kernels read and write the bytes themselves.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.quantize import quantize_rows_reference

LATENT_BLOCK = 128  # values of a latent row that share a scale
SCALE_BYTES = 4  # float32


def latent_row_bytes(rank: int, rope: int) -> int:
    """Bytes of a latent row in FP8: 656 for rank 512 and 64 rotated columns."""
    return rank + SCALE_BYTES * (rank // LATENT_BLOCK) + 2 * rope


def pack_latent_rows(rows: torch.Tensor, rank: int, power_of_two: bool = False) -> torch.Tensor:
    """``rows [..., rank + rope]`` to uint8 ``[..., latent_row_bytes(rank, rope)]``."""
    values, scales = quantize_rows_reference(rows[..., :rank], LATENT_BLOCK, power_of_two)
    rope = rows[..., rank:].to(torch.bfloat16).contiguous()
    return torch.cat((values.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)), dim=-1)


def unpack_latent_rows(packed: torch.Tensor, rank: int) -> torch.Tensor:
    """The inverse of :func:`pack_latent_rows`, in float32: the numbers that a kernel computes with."""
    values, scales, rope = packed.tensor_split((rank, rank + rank // 32), dim=-1)
    blocks = values.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, LATENT_BLOCK))
    latent = blocks * scales.contiguous().view(torch.float32)[..., None]
    return torch.cat((latent.flatten(-2), rope.contiguous().view(torch.bfloat16).float()), dim=-1)


def index_key_views(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an index-key pool, uint8 ``[pages, page_size, dim + 4]``: e4m3 values ``[pages, page_size, dim]`` and
    float32 scales ``[pages, page_size]``."""
    pages, page_size, row = pool.shape
    flat = pool.view(pages, page_size * row)
    border = page_size * (row - SCALE_BYTES)
    values = flat[:, :border].view(torch.float8_e4m3fn).unflatten(-1, (page_size, row - SCALE_BYTES))
    return values, flat[:, border:].view(torch.float32)
