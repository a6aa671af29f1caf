"""Rows of the latent cache side by side as plain numbers, for the MHA form, which expands them to keys and values.

    out[i] = row[slots[i]]            FP8 rows: e4m3 · scale, and the rotated part, in the dtype of the run

Formats: :mod:`.formats.row_format`. The numbers are those that the absorbed form computes with, rounded once.

Bits: rows are copied, or each expanded by itself.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.paged import gather_rows
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Rows of 656 bytes a program: 10 KiB in flight for each of many programs of a multiprocessor. And slots that it moves.
_ROWS, _SLOTS, _WARPS = 16, 1024, 4


@kernel(do_not_specialize=["count", "programs", "moving"])
def gather_latent_kernel(
    pool, pages, out, count, programs, slots, index_of_page, moved, moving, PAGE_SIZE: tl.constexpr,
    STRIDE: tl.constexpr, VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, FORMAT: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """The first ``programs`` programs gather the ``count`` rows of ``pages``, others move ``moving`` slots to these."""
    program = tl.program_id(0).to(tl.int64)
    if program < programs:
        entry = program * ROWS + tl.arange(0, ROWS)
        known = (entry < count)[:, None]
        last = tl.minimum(entry, count - 1)  # no mask: the last one serves beyond the end
        row = (tl.load(pages + last // PAGE_SIZE) * PAGE_SIZE + last % PAGE_SIZE).to(tl.uint32)
        words, scales, pairs = FORMAT.load(pool, row, STRIDE, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED)
        tile, rotated = FORMAT.expand(words, scales, pairs, out.dtype.element_ty, E4M3)
        target = out + entry[:, None] * (VALUE + ROTATED)
        column = FORMAT.columns(BLOCK_VALUE)[None, :]
        tl.store(target + column, tile, mask=known & (column < VALUE))
        column = tl.arange(0, BLOCK_ROTATED)[None, :]
        tl.store(target + VALUE + column, rotated, mask=known & (column < ROTATED))
    else:
        at = (program - programs) * SLOTS + tl.arange(0, SLOTS)
        slot = tl.load(slots + at, mask=at < moving, other=-1)
        index = tl.load(index_of_page + slot // PAGE_SIZE, mask=slot >= 0, other=0)
        tl.store(moved + at, tl.where(slot < 0, -1, index * PAGE_SIZE + slot % PAGE_SIZE), mask=at < moving)


def launch_gather(
    pool: torch.Tensor, pages: torch.Tensor, page_size: int, out: torch.Tensor, row_format: LatentFormat,
    slots: torch.Tensor, index_of_page: torch.Tensor, moved: torch.Tensor,
) -> None:  # fmt: skip
    """Writes the rows of ``pages [n]``, each of ``page_size`` rows of the pool, to ``out [n · page_size, width]``; and
    ``slots`` as rows of ``out``, by ``index_of_page``, to ``moved``."""
    rows, rank, rope, programs = row_format.rows(pool), row_format.rank, row_format.rope, cdiv(out.shape[0], _ROWS)
    gather_latent_kernel[(programs + cdiv(moved.numel(), _SLOTS),)](
        rows, pages, out, out.shape[0], programs, slots, index_of_page, moved, moved.numel(), PAGE_SIZE=page_size,
        STRIDE=rows.shape[1], VALUE=rank, ROTATED=rope,
        BLOCK_VALUE=max(row_format.least_block, next_power_of_2(rank)),
        BLOCK_ROTATED=max(16, next_power_of_2(rope)), ROWS=_ROWS, SLOTS=_SLOTS, FORMAT=row_format.helpers,
        E4M3=chip_of(pool).capability >= 89, num_warps=_WARPS,
    )  # fmt: skip


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
        slots = slots.contiguous()
        launch_gather(pool, slots, 1, out, row_format, slots, slots, slots[:0])
    return out
