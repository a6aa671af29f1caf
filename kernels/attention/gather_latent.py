"""Rows of the latent cache side by side as plain numbers, for the MHA form, which expands them to keys and values.

    out[i] = row[slots[i]]            FP8 rows: e4m3 · scale, and the rotated part, in the dtype of the run

Formats: :mod:`.formats.row_format`. The numbers are those that the absorbed form computes with, rounded once.

Bits: rows are copied, or each expanded by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.paged import gather_rows
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Rows of 656 bytes a program: 10 KiB in flight for each of many programs of a multiprocessor.
_ROWS, _WARPS = 16, 4


@triton.jit
def expand_rows(
    pool, row, out, entry, known, STRIDE: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
    FORMAT: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Writes rows ``row [ROWS]`` of a pool to rows ``entry`` of ``out``, those that are ``known``."""
    words, scales, pairs = FORMAT.load(pool, row, STRIDE, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED)
    tile, rotated = FORMAT.expand(words, scales, pairs, out.dtype.element_ty, E4M3)
    target = out + entry[:, None] * (VALUE + ROTATED)
    column = FORMAT.columns(BLOCK_VALUE)[None, :]
    tl.store(target + column, tile, mask=known[:, None] & (column < VALUE))
    column = tl.arange(0, BLOCK_ROTATED)[None, :]
    tl.store(target + VALUE + column, rotated, mask=known[:, None] & (column < ROTATED))


@kernel(do_not_specialize=["count"])
def gather_latent_kernel(
    pool, slots, out, count, STRIDE: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
    ROWS: tl.constexpr, FORMAT: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(slots + tl.minimum(entry, count - 1)).to(tl.uint32)  # no mask: the last one serves beyond the end
    known = entry < count
    expand_rows(pool, row, out, entry, known, STRIDE, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED, FORMAT, E4M3)


def expanding(pool: torch.Tensor, row_format: LatentFormat) -> dict[str, Any]:
    """Constants of a kernel that expands rows of a pool, and its warps."""
    return {
        "STRIDE": row_format.rows(pool).shape[1], "VALUE": row_format.rank, "ROTATED": row_format.rope,
        "BLOCK_VALUE": max(row_format.least_block, next_power_of_2(row_format.rank)),
        "BLOCK_ROTATED": max(16, next_power_of_2(row_format.rope)), "ROWS": _ROWS, "FORMAT": row_format.helpers,
        "E4M3": chip_of(pool).capability >= 89, "num_warps": _WARPS,
    }  # fmt: skip


@operation()
def gather_latent(
    pool: torch.Tensor, slots: torch.Tensor, row_format: LatentFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Gathers latent rows.

    Args:
        pool: ``[pages, page_size, columns]`` in ``row_format``.
        slots: ``[n]`` int32 or int64 rows of the flattened pool, in any order, none of them −1.
        row_format: format of the pool; plain rows have the dtype ``dtype``.
        dtype: dtype of the result.

    Returns:
        ``[n, rank + rope]`` in ``dtype``.
    """
    row_format.check_pool(pool)
    if not row_format.reads_as(dtype):
        raise ValueError(f"plain rows are gathered in their dtype {row_format.dtype}, not in {dtype}")
    if not row_format.coded:
        return gather_rows(pool, slots)
    if not runs_triton(pool):
        return row_format.unpack(gather_rows(pool, slots)).to(dtype)
    out = torch.empty(slots.shape[0], row_format.width, dtype=dtype, device=pool.device)
    if slots.shape[0]:
        gather_latent_kernel[(cdiv(slots.shape[0], _ROWS),)](
            row_format.rows(pool), slots.contiguous(), out, slots.shape[0], **expanding(pool, row_format)
        )
    return out
