"""Slots of positions: the rows of a paged pool that hold the tokens of a sequence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_LOOKED_UP, _WARPS = 2048, 4  # positions of a program


class Paging(NamedTuple):
    """The arguments of :func:`slots_of` after the positions, for operations that give slots instead of positions."""

    block_tables: torch.Tensor  # [sequences, max_pages] int32
    sequences: torch.Tensor  # [T], the row of the block tables for each
    page_size: int


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
    """Runs ``native/rows.cpp``; all tensors are int32."""
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
    """Finds the slots of positions in the pool.

    Args:
        positions: integer ``[T, ...]``; −1 stays −1.
        block_tables: ``[sequences, max_pages]`` int32.
        sequences: integer ``[T]``, the row of the block tables for each.

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
