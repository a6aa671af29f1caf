"""What all products of groups of rows share: which tile a program takes, found on the device from where the groups end;
which rows of a matrix a tile is made of; its end; and the launch.

With GATED the halves of a matrix are gate and up of a SwiGLU layer. The columns of a tile are those of gate and of up
in turns, so that both sums of a result lie in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import multiprocessors


class Tiles(NamedTuple):
    """The shape of a program's work, and how many programs a multiprocessor runs at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    resident: int
    swapped: bool = False


class _HasRows(Protocol):
    @property
    def rows(self) -> int: ...


AnyTiles = TypeVar("AnyTiles", bound=_HasRows)


def fitting(choices: Sequence[AnyTiles], rows: float) -> AnyTiles:
    """The first of ``choices``, smallest first, with room for so many rows in a tile; else the last."""
    return next((tiles for tiles in choices if rows <= tiles.rows), choices[-1])


def rows_by_group(counts: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Every group that has rows, and which ones, of groups that lie one behind the other; for the references."""
    first = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield group, slice(first, first + count)
        first += count


def most_tiles(rows: int, groups: int, size: int) -> int:
    """Tiles of ``size`` rows that ``rows`` rows take at most, however they are split among ``groups`` groups."""
    return (rows + min(rows, groups) * (size - 1)) // size


def empty_product(
    x: torch.Tensor, source: torch.Tensor | None, weight: torch.Tensor, gated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Where the products of ``x``, or of the rows of it that ``source`` names, go: ``[R, out]``.

    Raises:
        ValueError: ``weight [groups, rows, …]`` has no two halves where these are gate and up.
    """
    if gated and weight.shape[1] % 2:
        raise ValueError(f"gate and up must be two halves of the weight, which is {tuple(weight.shape)}")
    rows = (x if source is None else source).shape[0]
    return torch.empty(rows, weight.shape[1] // (1 + gated), dtype=dtype, device=x.device)


def launch_grouped(
    kernel: Any,
    tiles: Tiles,
    x: torch.Tensor,
    source: torch.Tensor | None,
    ends: torch.Tensor,
    operands: Sequence[Any],
    out: torch.Tensor,
    *,
    gated: bool,
    **constants: Any,
) -> None:
    """Launches a kernel of grouped products: as many programs as there is work for, or as run at a time.

    Args:
        kernel: takes ``x, source, ends, *operands, out, x_stride, width, inner, groups``, and as constants GATHER,
            GATED, ROWS, COLUMNS, BAND, GROUPS_PAD and ``constants``; ``width`` is that of ``out``.
        x: ``[R, in]``, or ``[S, in]`` with ``source``; elements of a row side by side.
        source: int32 ``[R]``, which row of x each row is made from.
        ends: int32 ``[groups]``, where the rows of each group end.
        out: ``[R, out]``.
    """
    (rows, width), groups = out.shape, ends.shape[0]
    most = most_tiles(rows, groups, tiles.rows) * cdiv(width * (1 + gated), tiles.columns)
    kernel[(min(most, tiles.resident * multiprocessors(x)),)](
        x, ends if source is None else source, ends.contiguous(), *operands, out, x.stride(0), width, x.shape[1],
        groups, GATHER=source is not None, GATED=gated, ROWS=tiles.rows, COLUMNS=tiles.columns, BAND=16,
        GROUPS_PAD=next_power_of_2(groups), num_warps=tiles.warps, num_stages=tiles.stages, **constants,
    )  # fmt: skip


@triton.jit
def group_tiles(ends, groups, ROWS: tl.constexpr, GROUPS_PAD: tl.constexpr):
    """Of every group ``[GROUPS_PAD]``: its first row, its end, how many tiles of ROWS rows it has, and how many tiles
    there are up to its end; nothing for numbers beyond the last group."""
    number = tl.arange(0, GROUPS_PAD)
    known = number < groups
    ends_here = tl.load(ends + number, mask=known, other=0)
    starts = tl.load(ends + number - 1, mask=known & (number > 0), other=0)
    tiles = tl.where(known, (ends_here - starts + ROWS - 1) // ROWS, 0)
    # Groups beyond the last count as ended behind all tiles.
    upto = tl.where(known, tl.cumsum(tiles, axis=0), 2147483647)
    return starts, ends_here, tiles, upto


@triton.jit
def banded(tile, row_tiles, column_tiles, BAND: tl.constexpr):
    """Row and column of a tile: in bands of BAND tiles of rows, and in a band rows first, so that programs that run
    together share rows and weights."""
    band = tile // (BAND * column_tiles)
    in_band = tile - band * BAND * column_tiles
    high = tl.minimum(row_tiles - band * BAND, BAND)
    return band * BAND + in_band % high, in_band // high


@triton.jit
def rows_of_tile(row_tile, starts, ends, tiles, upto, ROWS: tl.constexpr, GROUPS_PAD: tl.constexpr):
    """The group of a tile of rows, its rows ``[ROWS]``, and which of them are the group's."""
    group = tl.sum((upto <= row_tile).to(tl.int32))
    found = tl.arange(0, GROUPS_PAD) == group
    row = tl.sum(tl.where(found, starts + (row_tile - upto + tiles) * ROWS, 0)) + tl.arange(0, ROWS)
    return group, row, row < tl.sum(tl.where(found, ends, 0))


@triton.jit
def rows_read(source, row, inside, GATHER: tl.constexpr):
    """The rows of x that rows are made from."""
    place = row
    if GATHER:
        place = tl.load(source + row, mask=inside, other=0)
    return place


@triton.jit
def weight_rows(group, start, width, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """Of all matrices' rows, those ``[COLUMNS]`` that a tile is made of whose result begins at column ``start``, int64.
    Columns beyond the last repeat it and are not stored: weights need no mask there."""
    column = tl.arange(0, COLUMNS)
    if GATED:
        rows = column % 2 * width + tl.minimum(start + column // 2, width - 1) + group.to(tl.int64) * 2 * width
    else:
        rows = tl.minimum(start + column, width - 1) + group.to(tl.int64) * width
    return rows


@triton.jit
def gate_columns(total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``total [ROWS, COLUMNS]`` of gate and up in turns through SwiGLU: ``[ROWS, COLUMNS / 2]``."""
    gate, up = tl.split(tl.reshape(total, (ROWS, COLUMNS // 2, 2)))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def store_tile(out, total, row, inside, start, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """Rounds the sums ``total [ROWS, COLUMNS]``, gated if GATED, into ``out`` from column ``start`` on."""
    if GATED:
        total = gate_columns(total, ROWS, COLUMNS)
    target = start + tl.arange(0, COLUMNS // 2 if GATED else COLUMNS)
    out_at = out + row.to(tl.int64)[:, None] * width + target[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside[:, None] & (target < width)[None, :])
