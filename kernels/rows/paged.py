"""Reading and writing rows of a paged pool.

Shapes: ``pool [pages, page_size, width]``, ``block_tables [sequences, max_pages]`` int32 (page numbers in order of
position), slots int32 or int64, −1 for nowhere.

Operations that write rows take their destination in two forms: a pool with the slots of the rows, or plain rows ``[R,
width]`` with any row stride and no slots, such as a part of the buffer that context parallelism gathers. Plain rows are
a pool whose pages hold one row each (:func:`as_pool`), so a kernel knows one form only.

Bits: rows are copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2

# Bytes that a program copies: 16 KiB is 8 loads of 16 bytes for each of 128 threads.
_COPIED_BYTES = 16384


def as_pool(out: torch.Tensor, slots: torch.Tensor | None, rows: int, width: int, alignment: int = 1) -> torch.Tensor:
    """The destination of ``rows`` rows of ``width`` elements as a pool ``[pages, page_size, width]``, whose rows lie
    next to each other in a page; pages begin at multiples of ``alignment`` bytes."""
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
    if alignment > 1 and (pool.stride(0) | pool.data_ptr()) % alignment:
        raise ValueError(f"such rows must begin at multiples of {alignment} bytes; the row stride is {pool.stride(0)}")
    return pool


def check_written(outside: int, pool: torch.Tensor) -> None:
    """Raises ``IndexError`` where a kernel of the CPU has found slots ``outside`` of the pool."""
    if outside:
        raise IndexError(f"slots must be below {pool.shape[0] * pool.shape[1]}, the rows of the pool")


def store_native(
    run: Callable[[torch.Tensor, torch.Tensor | None], None], store: Callable[[torch.Tensor], None],
    pool: torch.Tensor, slots: torch.Tensor | None, like: torch.Tensor, width: int,
) -> None:  # fmt: skip
    """Stores rows that a kernel of the CPU makes in the dtype of ``like``: in a pool of that dtype at once, else by way
    of plain rows.

    Args:
        run: ``run(pool, slots)``, the kernel.
        store: stores plain rows ``[R, width]`` in the pool's own format.
        like: the kernel's input ``[R, …]``.
    """
    if pool.dtype == like.dtype:
        run(pool, slots)
    else:
        rows = like.new_empty(len(like), 1, width)
        run(rows, None)
        store(rows[:, 0])


@triton.jit
def page_and_offset(slots, row, count, PAGE_SIZE: tl.constexpr):
    """Destinations of the rows ``row [rows]``, int64, of ``count``: page, offset in the page (in rows, int64), and a
    mask of the rows that have one, each ``[rows, 1]``. PAGE_SIZE 0: no slots, every row is a page."""
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
    """Copies the rows at the pointers ``source [rows, 1]`` to those at ``target``."""
    column = tl.arange(0, PADDED)[None, :]
    values = tl.load(source + column, mask=keep & (column < WIDTH), other=0)
    tl.store(target + column, values.to(target.dtype.element_ty), mask=keep & (column < WIDTH))


def store_rows_reference(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None) -> None:
    """``pool`` as :func:`as_pool` gives it."""
    if slots is None:
        pool[:, 0] = rows.to(pool.dtype)
        return
    has_slot = slots >= 0
    written = slots[has_slot]
    page_size = pool.shape[1]
    pool[written // page_size, written % page_size] = rows[has_slot].to(pool.dtype)


def rows_at_once(row_bytes: int) -> int:
    """Number of rows of about ``row_bytes`` bytes that a program copies: a power of two."""
    return max(1, _COPIED_BYTES // next_power_of_2(row_bytes))


def read_rows(pool: torch.Tensor, block_table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of the positions ``start … stop-1`` of the sequence with ``block_table [max_pages]``: ``[stop-start,
    width]``.

    References copy the rows that they read; a kernel reads the pool itself.
    """
    page_size = pool.shape[1]
    first, last = start // page_size, cdiv(stop, page_size)
    pages = pool.index_select(0, block_table[first:last])
    return pages.view(-1, pool.shape[-1])[start - first * page_size : stop - first * page_size]


def gather_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of ``slots [n]``, none of them −1: ``[n, width]``.

    PyTorch's own gather runs at the speed of memory, so it serves every device.
    """
    return pool.view(-1, pool.shape[-1]).index_select(0, slots)
