"""Plain cache rows: numbers of one floating dtype, as they were computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.row_format import Helpers, IndexKeyFormat, LatentFormat, RowFormat
from dsa_engine.kernels.runtime.launch import Chip

_ROWS = 16  # keys a program, where no product asks for more: enough loads in flight


@triton.jit
def value_columns(BLOCK: tl.constexpr):
    """Columns in their order."""
    return tl.arange(0, BLOCK)


@triton.jit
def load_tile(first, columns, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """``[rows, BLOCK]``: columns ``columns [BLOCK]`` from the pointers ``first [rows, 1]``, zero from COLUMNS on."""
    columns = columns[None, :]
    if COLUMNS == BLOCK:
        return tl.load(first + columns)
    else:
        return tl.load(first + columns, mask=columns < COLUMNS, other=0)


@triton.jit
def load_latents(
    pool, row, STRIDE: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
):  # fmt: skip
    """Rows ``row [rows]``, of 32 bits: ``[rows, BLOCK_VALUE]`` and ``[rows, BLOCK_ROTATED]`` in the pool's dtype.

    No row is masked: a predicate for each of a thread's copies took a fifth of the attention's instructions. So all
    must be written rows, also those that :func:`._online_softmax.attend` leaves out: 0 · NaN is NaN."""
    first = pool + row[:, None].to(tl.int64) * STRIDE
    tile = load_tile(first, tl.arange(0, BLOCK_VALUE), VALUE, BLOCK_VALUE)
    return tile, load_tile(first + VALUE, tl.arange(0, BLOCK_ROTATED), ROTATED, BLOCK_ROTATED)


@triton.jit
def store_latents(
    target, column, latent, a, b, keep,
    RANK: tl.constexpr, ROTATED_AT: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    element: tl.constexpr = target.dtype.element_ty
    tl.store(target + column, latent.to(element), mask=keep & (column < RANK))
    return target + ROTATED_AT, a.to(element), b.to(element)


@triton.jit
def operand(values):
    return values


class _Plain(RowFormat):
    coded = False
    alignment = 1

    @cached_property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def columns(self) -> int:
        return self.width

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@dataclass(frozen=True)
class PlainLatents(_Plain, LatentFormat):
    dtype: torch.dtype

    helpers = Helpers(False, columns=value_columns, load=load_latents, store=store_latents)
    least_block = 16

    @cached_property
    def rotated_at(self) -> int:
        return self.rank


@dataclass(frozen=True)
class PlainIndexKeys(_Plain, IndexKeyFormat):
    dtype: torch.dtype

    helpers = Helpers(False, operand=operand)
    least_part = 1

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return rows.to(self.dtype), None

    def views(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return pool, None

    def operands(self, q: torch.Tensor, keys: torch.Tensor, chip: Chip) -> tuple[torch.Tensor, torch.Tensor]:
        return q, keys

    def rows_at_once(self, x: torch.Tensor) -> int:
        return _ROWS
