"""Reading and writing rows of a paged pool.

Shapes: ``pool [pages, page_size, width]``, ``block_tables [sequences, max_pages]`` int32 (page numbers in order of
position), slots int32 or int64, −1 for nowhere.

What writes rows takes its destination in two forms: a pool with the slots of the rows, or plain rows ``[R, width]``
with any row stride and no slots, such as a part of the buffer that context parallelism gathers. Plain rows are a pool
whose pages hold one row each (:func:`as_pool`), so a kernel knows one form only.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dsa_engine.kernels import cpu
from dsa_engine.kernels.integers import cdiv, next_power_of_2
from dsa_engine.kernels.launch import runs_triton
from dsa_engine.kernels.operation import operation

# Bytes that a program copies, and positions that it looks up. 16 KiB is 8 loads of 16 bytes for each of 128 threads.
_COPIED_BYTES, _LOOKED_UP, _WARPS = 16384, 2048, 4


def as_pool(out: torch.Tensor, slots: torch.Tensor | None, rows: int, width: int) -> torch.Tensor:
    """The destination of ``rows`` rows of ``width`` elements as a pool ``[pages, page_size, width]``.

    Raises:
        ValueError: ``out`` is neither a pool with ``rows`` slots nor ``[rows, width]`` without, or rows of a page are
            not next to each other.
        TypeError: slots that are not int32 or int64.
    """
    if slots is None:
        if out.shape != (rows, width):
            raise ValueError(f"without slots the rows go to a buffer [{rows}, {width}], not {list(out.shape)}")
        pool = out.unsqueeze(1)
    else:
        if slots.shape != (rows,):
            raise ValueError(f"{rows} rows need as many slots, not {list(slots.shape)}")
        if slots.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"slots must be int32 or int64, not {slots.dtype}")
        if out.dim() != 3 or out.shape[-1] != width:
            raise ValueError(f"with slots the rows go to a pool [pages, page_size, {width}], not {list(out.shape)}")
        pool = out
    if pool.stride(2) != 1 or (pool.shape[1] > 1 and pool.stride(1) != width):
        raise ValueError(f"the rows of a page must be contiguous; the strides of the destination are {out.stride()}")
    return pool


def check_written(outside: int, pool: torch.Tensor) -> None:
    """Raises ``IndexError`` where a kernel of the CPU has found slots ``outside`` of the pool."""
    if outside:
        raise IndexError(f"slots must be below {pool.shape[0] * pool.shape[1]}, the rows of the pool")


@triton.jit
def page_and_offset(slots, row, count, PAGE_SIZE: tl.constexpr):
    """Where the rows numbered ``row [rows]``, int64, of ``count`` go: page, offset in the page (in rows, int64), and
    whether they go anywhere, each ``[rows, 1]``. PAGE_SIZE 0: no slots, every row is a page."""
    keep = row < count
    if PAGE_SIZE == 0:
        page, offset = row, row * 0
    else:
        # Loaded without a second dimension, along which every thread of a row would load it again.
        slot = tl.load(slots + row, mask=keep, other=-1).to(tl.int64)
        page, offset, keep = slot // PAGE_SIZE, slot % PAGE_SIZE, slot >= 0
    return page[:, None], offset[:, None], keep[:, None]


@triton.jit
def copy_tile(source, target, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows at the pointers ``source [rows, 1]`` to those at ``target``."""
    column = tl.arange(0, PADDED)[None, :]
    values = tl.load(source + column, mask=keep & (column < WIDTH), other=0)
    tl.store(target + column, values.to(target.dtype.element_ty), mask=keep & (column < WIDTH))


def store_rows_reference(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None) -> None:
    """``pool`` as :func:`as_pool` gives it."""
    if slots is None:
        pool[:, 0] = rows.to(pool.dtype)
        return
    kept = slots >= 0
    written = slots[kept]
    page_size = pool.shape[1]
    pool[written // page_size, written % page_size] = rows[kept].to(pool.dtype)


@triton.jit(do_not_specialize=["count"])
def store_rows_kernel(
    rows, slots, pool, count, row_stride, page_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    page, offset, keep = page_and_offset(slots, row, count, PAGE_SIZE)
    copy_tile(rows + row[:, None] * row_stride, pool + page * page_stride + offset * WIDTH, keep, WIDTH, PADDED)


@operation(writes=("pool",))
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


def rows_at_once(row_bytes: int) -> int:
    """How many rows of about ``row_bytes`` bytes a program copies: a power of two."""
    return max(1, _COPIED_BYTES // next_power_of_2(row_bytes))


def read_rows(pool: torch.Tensor, block_table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of the positions ``start … stop-1`` of the sequence with ``block_table [max_pages]``: ``[stop-start,
    width]``.

    For the references, which copy what they are about to read; a kernel reads the pool in place.
    """
    page_size = pool.shape[1]
    first, last = start // page_size, cdiv(stop, page_size)
    pages = pool.index_select(0, block_table[first:last])
    return pages.view(-1, pool.shape[-1])[start - first * page_size : stop - first * page_size]


def gather_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of ``slots [n]``, none of them −1: ``[n, width]``, for what needs them side by side.

    PyTorch's own gather runs at the speed of memory, so it serves every device.
    """
    return pool.view(-1, pool.shape[-1]).index_select(0, slots)


def slots_of_reference(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    known = positions >= 0
    at = positions.clamp(min=0).long()
    first_page = sequences.long() * block_tables.shape[1]
    pages = block_tables.flatten()[first_page.view(-1, *(1,) * (positions.dim() - 1)) + at // page_size]
    return torch.where(known, pages * page_size + at % page_size, -1).int()


@triton.jit(do_not_specialize=["count"])
def slots_of_kernel(
    positions, tables, sequences, slots, count, per_row, table_stride,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of ``positions [count, per_row]`` a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    table = tables + tl.load(sequences + row, mask=row < count, other=0).to(tl.int64) * table_stride
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count)[:, None] & (column < per_row)
    at = row[:, None] * per_row + column
    position = tl.load(positions + at, mask=inside, other=-1)
    known = position >= 0
    page = tl.load(table[:, None] + position // PAGE_SIZE, mask=known, other=0)
    slot = tl.where(known, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots + at, slot.to(tl.int32), mask=inside)


def _slots_of_native(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    """By ``native/rows.cpp``; all are int32."""
    positions, tables, sequences = positions.contiguous(), block_tables.contiguous(), sequences.contiguous()
    slots = torch.empty_like(positions)
    rows, columns = positions.shape[0], math.prod(positions.shape[1:])
    outside = cpu.kernels().dsa_slots_of(
        positions.data_ptr(), tables.data_ptr(), sequences.data_ptr(), slots.data_ptr(), rows, columns,
        *tables.shape, tables.stride(0), page_size, cpu.row_threads(positions.numel()),
    )  # fmt: skip
    if outside:
        raise IndexError(f"positions or sequences lie outside of the block tables {list(tables.shape)}")
    return slots


@operation(runs=lambda positions: runs_triton(positions) or cpu.serves(positions, dtype=torch.int32))
def slots_of(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots of positions: where each lies in the pool.

    Args:
        positions: integer ``[T, ...]``; −1 stays −1.
        block_tables: ``[sequences, max_pages]`` int32.
        sequences: integer ``[T]``, the block table's row of each.

    Returns:
        int32, shaped like ``positions``.

    Raises:
        IndexError: a position or sequence outside of the block tables, where the CPU's kernel runs; no other looks.
    """
    if positions.shape[0] != sequences.shape[0]:
        raise ValueError(f"{positions.shape[0]} rows of positions, but {sequences.shape[0]} sequence numbers")
    if cpu.serves(positions, block_tables, sequences, dtype=torch.int32):
        return _slots_of_native(positions, block_tables, sequences, page_size)
    if not runs_triton(positions):
        return slots_of_reference(positions, block_tables, sequences, page_size)
    slots = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    if slots.numel():
        count, per_row = positions.shape[0], math.prod(positions.shape[1:])
        columns = min(next_power_of_2(per_row), _LOOKED_UP)
        rows = _LOOKED_UP // columns
        slots_of_kernel[(cdiv(count, rows), cdiv(per_row, columns))](
            positions.contiguous(), block_tables.contiguous(), sequences.contiguous(), slots,
            count, per_row, block_tables.shape[1],
            PAGE_SIZE=page_size, ROWS=rows, COLUMNS=columns, num_warps=_WARPS,
        )  # fmt: skip
    return slots
