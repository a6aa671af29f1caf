"""Tiles of products of groups of rows: which tile a program takes, found on the device from where the groups end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import triton
import triton.language as tl


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
