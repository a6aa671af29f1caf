"""Rows of any origin to their slots of a pool.

Bits: rows are copied.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.rows.paged import as_pool, copy_tile, page_and_offset, rows_at_once, store_rows_reference
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_WARPS = 4


@kernel(do_not_specialize=["count"])
def store_rows_kernel(
    rows, slots, pool, count, row_stride, page_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    page, offset, keep = page_and_offset(slots, row, count, PAGE_SIZE)
    copy_tile(rows + row[:, None] * row_stride, pool + page * page_stride + offset * WIDTH, keep, WIDTH, PADDED)


@operation(writes=("pool",), waits=True)
def store_rows(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes ``rows [R, width]`` to ``slots [R]`` of the pool; rows with slot −1 are dropped.

    The rows may come in any order and with any row stride, so that the gathered buffer of a context-parallel step goes
    straight to its causal slots. They take the dtype of the pool. No slot may be named twice.
    """
    if rows.shape != (slots.shape[0], pool.shape[-1]):
        raise ValueError(f"{tuple(rows.shape)} rows do not fit {slots.shape[0]} slots of width {pool.shape[-1]}")
    count, width = rows.shape
    pool = as_pool(pool, slots, count, width)
    if not runs_triton(pool):
        store_rows_reference(pool, rows, slots)
    elif rows.numel():
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        padded = next_power_of_2(width)
        at_once = rows_at_once(padded * rows.element_size())
        store_rows_kernel[(cdiv(count, at_once),)](
            rows, slots, pool, count, rows.stride(0), pool.stride(0),
            WIDTH=width, PADDED=padded, PAGE_SIZE=pool.shape[1], ROWS=at_once, num_warps=_WARPS,
        )  # fmt: skip
