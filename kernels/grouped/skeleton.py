"""The device's side of grouped products, the same for every weight format: :func:`multiply_groups` finds the tiles of a
program from the ends of the groups, calls a format's function to multiply each, and stores the results.

With GATED the halves of a matrix are gate and up of a SwiGLU layer. The columns of a tile are those of gate and of up
in turns, so that both sums of a result lie in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import quantize_tile


@triton.jit
def group_tiles(row_ends, groups, ROWS: tl.constexpr, GROUPS_PAD: tl.constexpr):
    """Four numbers of every group, each ``[GROUPS_PAD]``: its first row, the row after its last, its tiles of ROWS
    rows, and the tiles up to its end. Numbers beyond the last group have no tiles."""
    number = tl.arange(0, GROUPS_PAD)
    exists = number < groups
    stops = tl.load(row_ends + number, mask=exists, other=0)
    starts = tl.load(row_ends + number - 1, mask=exists & (number > 0), other=0)
    tiles = tl.where(exists, (stops - starts + ROWS - 1) // ROWS, 0)
    # Groups beyond the last count as ended after all tiles.
    upto = tl.where(exists, tl.cumsum(tiles, axis=0), 2147483647)
    return starts, stops, tiles, upto


@triton.jit
def banded(tile, row_tiles, column_tiles, BAND: tl.constexpr):
    """Row and column of a tile: in bands of BAND tiles of rows, and in a band rows first, so that programs that run
    together share rows and weights."""
    band = tile // (BAND * column_tiles)
    in_band = tile - band * BAND * column_tiles
    high = tl.minimum(row_tiles - band * BAND, BAND)
    return band * BAND + in_band % high, in_band // high


@triton.jit
def rows_of_tile(row_tile, starts, stops, tiles, upto, ROWS: tl.constexpr, GROUPS_PAD: tl.constexpr):
    """The group of a tile of rows, its rows ``[ROWS]``, and a mask of those that belong to the group."""
    group = tl.sum((upto <= row_tile).to(tl.int32))
    chosen = tl.arange(0, GROUPS_PAD) == group
    row = tl.sum(tl.where(chosen, starts + (row_tile - upto + tiles) * ROWS, 0)) + tl.arange(0, ROWS)
    return group, row, row < tl.sum(tl.where(chosen, stops, 0))


@triton.jit
def source_rows(source, row, inside, GATHER: tl.constexpr):
    """The rows of x that the rows ``row`` are made from."""
    source_row = row
    if GATHER:
        source_row = tl.load(source + row, mask=inside, other=0)
    return source_row


@triton.jit
def weight_rows(group, start, width, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """The rows ``[COLUMNS]`` of all matrices, int64, for a tile whose result begins at column ``start``. Columns beyond
    the last repeat it and are not stored: weights need no mask there."""
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
def sum_tile(
    x, source_row, inside, weight, weight_row, x_stride, inner, SUM: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums ``[ROWS, COLUMNS]`` of the products of rows of x with rows of a weight, in the type SUM. WHOLE: DEPTH
    divides the inner dimension. SWAPPED: the product is computed transposed, as a warpgroup's products have 64 rows and
    few columns."""
    depth = tl.arange(0, DEPTH)
    x_at = x + source_row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = weight + weight_row[None, :] * inner + depth[:, None]
    total = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), SUM)
    for done in range(0, inner, DEPTH):
        if WHOLE:
            x_tile = tl.load(x_at, mask=inside[:, None], other=0)
            weight_tile = tl.load(weight_at)
        else:
            x_tile = tl.load(x_at, mask=inside[:, None] & (depth < inner - done)[None, :], other=0)
            weight_tile = tl.load(weight_at, mask=(depth < inner - done)[:, None], other=0)
        if SWAPPED:
            total = tl.dot(tl.trans(weight_tile), tl.trans(x_tile), total, input_precision=PRECISION, out_dtype=SUM)
        else:
            total = tl.dot(x_tile, weight_tile, total, input_precision=PRECISION, out_dtype=SUM)
        x_at += DEPTH
        weight_at += DEPTH
    return total


@triton.jit
def multiply_groups(
    x, source, row_ends, operands, out, out_scale, x_stride, width, inner, groups,
    PRODUCT: tl.constexpr, CONSTANTS: tl.constexpr, GATHER: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr,
):  # fmt: skip
    """Multiplies the tiles ``[ROWS, COLUMNS]`` of all groups, each program every so many; ``width`` is that of ``out``.

    ``PRODUCT(x, source_row, inside, group, start, weight_row, operands, x_stride, width, inner, GATED, ROWS, COLUMNS,
    CONSTANTS)`` returns the float32 sums of a tile. With ``out_scale`` the results are quantised to e4m3, a scale for
    each row of a tile; CONSTANTS then ends with POWER_OF_TWO and CONVERTS of :func:`.e4m3.quantize_tile`."""
    shown: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS  # columns of the result
    starts, stops, tiles, upto = group_tiles(row_ends, groups, ROWS, GROUPS_PAD)
    row_tiles = tl.sum(tiles)
    column_tiles = tl.cdiv(width, shown)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = banded(tile, row_tiles, column_tiles, BAND)
        start = column_tile * shown
        group, row, inside = rows_of_tile(row_tile, starts, stops, tiles, upto, ROWS, GROUPS_PAD)
        source_row = source_rows(source, row, inside, GATHER)
        weight_row = weight_rows(group, start, width, COLUMNS, GATED)
        total = PRODUCT(
            x, source_row, inside, group, start, weight_row, operands, x_stride, width, inner, GATED, ROWS, COLUMNS,
            CONSTANTS,
        )  # fmt: skip
        if GATED:
            total = gate_columns(total, ROWS, COLUMNS)
        column = start + tl.arange(0, shown)[None, :]
        at, stored = out + row.to(tl.int64)[:, None] * width + column, inside[:, None] & (column < width)
        if out_scale is None:
            tl.store(at, total.to(out.dtype.element_ty), mask=stored)
        else:
            code, scale = quantize_tile(tl.where(column < width, total, 0.0), CONSTANTS[-2], CONSTANTS[-1])
            tl.store(at, code, mask=stored)
            tl.store(out_scale + row.to(tl.int64)[:, None] * column_tiles + column_tile, scale, mask=inside[:, None])
