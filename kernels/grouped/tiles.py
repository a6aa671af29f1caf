"""The host's side of grouped products, the same for every weight format: groups, the tiles of a program, the launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import chip_of, is_batch_invariant


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
    """The first of ``choices``, smallest first, with room for these rows in a tile; else the last. Under
    :func:`.launch.batch_invariance` always the second: tiles of another depth add in another order."""
    if is_batch_invariant():
        return choices[1]
    return next((tiles for tiles in choices if rows <= tiles.rows), choices[-1])


class Groups(NamedTuple):
    """Consecutive groups of rows, each of which is multiplied by its own matrix.

    Attributes:
        row_ends: int32 ``[groups]`` on the device: the index after the last row of each group, at most R.
        source: int32 ``[R]``, the row of x ``[S, in]`` that each row is made from; None: x holds the rows, ``[R, in]``.
        gated: the halves of a matrix, ``[groups, 2 · out, …]``, are gate and up of a SwiGLU layer, and the sums go
            through it before they are rounded.
        expected: number of local rows, if the host knows it; None: R. Chooses tiles only.
    """

    row_ends: torch.Tensor
    source: torch.Tensor | None = None
    gated: bool = False
    expected: float | None = None


def max_tiles(rows: int, groups: int, size: int) -> int:
    """The largest number of tiles of ``size`` rows that ``rows`` rows take, however ``groups`` groups divide them."""
    return (rows + min(rows, groups) * (size - 1)) // size


def empty_product(x: torch.Tensor, weight: torch.Tensor, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """An empty result ``[R, out]`` for products with ``weight [groups, rows, …]``."""
    if groups.gated and weight.shape[1] % 2:
        raise ValueError(f"gate and up must be two halves of the weight, which is {tuple(weight.shape)}")
    rows = (x if groups.source is None else groups.source).shape[0]
    return torch.empty(rows, weight.shape[1] // (1 + groups.gated), dtype=dtype, device=x.device)


def launch_grouped(
    kernel: Any, choices: Sequence[Tiles], x: torch.Tensor, operands: Sequence[Any], out: torch.Tensor, groups: Groups,
    **constants: Any,
) -> None:  # fmt: skip
    """Launches a kernel of grouped products, with a program for each tile, but no more than run at a time.

    Args:
        kernel: takes ``x, source, row_ends, *operands, out, x_stride, width, inner, groups``, and as constants GATHER,
            GATED, WHOLE, ROWS, COLUMNS, DEPTH, SWAPPED, BAND, GROUPS_PAD and ``constants``; ``width`` is that of
            ``out``.
        choices: the first with room for a group's rows is taken, else the last.
        x: elements of a row side by side.
        out: ``[R, out]``; rows beyond the last end are not written.
    """
    row_ends, source, gated, expected = groups
    if row_ends.dtype != torch.int32 or (source is not None and source.dtype != torch.int32):
        given = None if source is None else source.dtype
        raise ValueError(f"row_ends and source must be int32, not {row_ends.dtype} and {given}")
    if not out.numel():
        return
    (rows, width), count = out.shape, len(row_ends)
    tiles = fitting(choices, (rows if expected is None else expected) / count)
    programs = max_tiles(rows, count, tiles.rows) * cdiv(width * (1 + gated), tiles.columns)
    kernel[(min(programs, tiles.resident * chip_of(x).multiprocessors),)](
        x, row_ends if source is None else source, row_ends.contiguous(), *operands, out, x.stride(0), width,
        x.shape[1], count, GATHER=source is not None, GATED=gated, WHOLE=x.shape[1] % tiles.depth == 0,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, SWAPPED=tiles.swapped, BAND=16,
        GROUPS_PAD=next_power_of_2(count), num_warps=tiles.warps, num_stages=tiles.stages, **constants,
    )  # fmt: skip
