"""Reading and writing rows of a paged pool.

Shapes: ``pool [pages, page_size, width]``, ``block_tables [sequences, max_pages]`` int32 (page numbers in order of
position), slots int32 or int64, −1 for nowhere.
"""

from __future__ import annotations

import torch


def store_rows_reference(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    kept = slots >= 0
    pool.view(-1, pool.shape[-1])[slots[kept]] = rows[kept].to(pool.dtype)


def store_rows(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes ``rows [R, width]`` to ``slots [R]`` of the pool; rows with slot −1 are dropped.

    The rows may come in any order, so that the gathered buffer of a context-parallel step goes straight to its causal
    places.
    """
    if rows.shape != (slots.shape[0], pool.shape[-1]):
        raise ValueError(f"{tuple(rows.shape)} rows do not fit {slots.shape[0]} slots of width {pool.shape[-1]}")
    store_rows_reference(pool, rows, slots)


def read_rows(pool: torch.Tensor, block_table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of the positions ``start … stop-1`` of the sequence with ``block_table [max_pages]``: ``[stop-start,
    width]``.

    For the references, which copy what they are about to read; a kernel reads the pool in place.
    """
    page_size = pool.shape[1]
    first, last = start // page_size, -(-stop // page_size)
    pages = pool.index_select(0, block_table[first:last])
    return pages.view(-1, pool.shape[-1])[start - first * page_size : stop - first * page_size]


def slots_of_reference(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    known = positions >= 0
    places = positions.clamp(min=0).long()
    first_page = sequences.long() * block_tables.shape[1]
    pages = block_tables.flatten()[first_page.view(-1, *(1,) * (positions.dim() - 1)) + places // page_size]
    return torch.where(known, pages * page_size + places % page_size, -1).int()


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
    """
    if positions.shape[0] != sequences.shape[0]:
        raise ValueError(f"{positions.shape[0]} rows of positions, but {sequences.shape[0]} sequence numbers")
    return slots_of_reference(positions, block_tables, sequences, page_size)
