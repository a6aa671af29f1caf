"""The host's side of grouped products: the tiles of a program, and the launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

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


def fitting(choices: Sequence[Tiles], rows: float) -> Tiles:
    """The first of ``choices``, smallest first, with room for so many rows in a tile; else the last."""
    return next((tiles for tiles in choices if rows <= tiles.rows), choices[-1])


def rows_by_group(counts: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Each group that has rows, and the slice of its rows, where groups lie one after the other; for references."""
    first = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield group, slice(first, first + count)
        first += count


def max_tiles(rows: int, groups: int, size: int) -> int:
    """The largest number of tiles of ``size`` rows that ``rows`` rows take, however ``groups`` groups divide them."""
    return (rows + min(rows, groups) * (size - 1)) // size


def empty_product(
    x: torch.Tensor, source: torch.Tensor | None, weight: torch.Tensor, gated: bool, dtype: torch.dtype
) -> torch.Tensor:
    """An empty result ``[R, out]`` for the products of ``x``, or of the rows of it that ``source`` names.

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
    row_ends: torch.Tensor,
    operands: Sequence[Any],
    out: torch.Tensor,
    *,
    gated: bool,
    **constants: Any,
) -> None:
    """Launches a kernel of grouped products, with a program for each tile, but no more than run at a time.

    Args:
        kernel: takes ``x, source, row_ends, *operands, out, x_stride, width, inner, groups``, and as constants GATHER,
            GATED, ROWS, COLUMNS, BAND, GROUPS_PAD and ``constants``; ``width`` is that of ``out``.
        x: ``[R, in]``, or ``[S, in]`` with ``source``; elements of a row side by side.
        source: int32 ``[R]``, the row of x that each row is made from.
        row_ends: int32 ``[groups]``, the index after the last row of each group.
        out: ``[R, out]``.
    """
    (rows, width), groups = out.shape, row_ends.shape[0]
    count = max_tiles(rows, groups, tiles.rows) * cdiv(width * (1 + gated), tiles.columns)
    kernel[(min(count, tiles.resident * multiprocessors(x)),)](
        x, row_ends if source is None else source, row_ends.contiguous(), *operands, out, x.stride(0), width,
        x.shape[1], groups, GATHER=source is not None, GATED=gated, ROWS=tiles.rows, COLUMNS=tiles.columns, BAND=16,
        GROUPS_PAD=next_power_of_2(groups), num_warps=tiles.warps, num_stages=tiles.stages, **constants,
    )  # fmt: skip
