"""Products of consecutive groups of rows in FP8: activations quantised 1 × 128, weights in 128 × 128 blocks.

    h[r] = silu(gate[g] · x[s]) · (up[g] · x[s])      gated: quantised straight from float32, rounded nowhere between
    y[r] = weight[g] · x[r]                           for the rows r of group g;  s = source[r]

Products are those of `linear/block_scaled_matmul.py`, which has its sums from here. The kernel gathers rows, multiplies
by gate and up, gates and quantises in one pass: between the two products of an expert a value is a byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import converts_e4m3, quantize_tile
from dsa_engine.kernels.grouped.skeleton import multiply_groups
from dsa_engine.kernels.grouped.tiles import Tiles, fitting, launch_grouped
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import config_for

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def block_products(
    x_at, x_scale_at, rows_inside, weight_at, weight_scale_at, begin, end, inner, to_up_scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr, GATED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr = False, CONVERTS: tl.constexpr = False,
):  # fmt: skip
    """Sums a tile over the blocks ``begin`` … ``end - 1`` of the inner dimension: float32 ``[ROWS, COLUMNS]``, or with
    SWAPPED ``[COLUMNS, ROWS]``, as a warpgroup's products have 64 rows and few columns.

    ``x_at [ROWS, 128]``, ``x_scale_at [ROWS]``, ``weight_at [COLUMNS, 128]`` and ``weight_scale_at`` point to what
    belongs to block ``begin``; all COLUMNS lie in one block of the weight. WHOLE: the last block is not partial. GATED:
    columns are in turns of two weights, the scales of the second ``to_up_scale`` after those of the first. Without
    ``x_scale_at`` x holds numbers, which are quantised here, as :func:`.e4m3.quantize_tile` says.
    """
    depth = tl.arange(0, _BLOCK)
    total = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    if GATED and SWAPPED:
        weight_scale_at += tl.arange(0, COLUMNS) % 2 * to_up_scale
    for block in range(begin, end):
        mask = rows_inside[:, None]
        if WHOLE:
            weight_tile = tl.load(weight_at)
        else:
            remaining = (depth < inner - block * _BLOCK)[None, :]
            mask &= remaining
            weight_tile = tl.load(weight_at, mask=remaining, other=0.0)
        x_tile = tl.load(x_at, mask=mask, other=0.0)
        if x_scale_at is None:
            code, row_scale = quantize_tile(x_tile.to(tl.float32), POWER_OF_TWO, CONVERTS)
            x_tile, scale = code.to(tl.float8e4nv, bitcast=True), tl.reshape(row_scale, (ROWS,))
        else:
            scale = tl.load(x_scale_at, mask=rows_inside, other=0.0)
            x_scale_at += 1
        weight_scale = tl.load(weight_scale_at)
        if GATED and SWAPPED:
            total += tl.dot(weight_tile, tl.trans(x_tile)) * scale[None, :] * weight_scale[:, None]
        elif SWAPPED:
            total += tl.dot(weight_tile, tl.trans(x_tile)) * (scale * weight_scale)[None, :]
        elif GATED:
            both = tl.join(scale * weight_scale, scale * tl.load(weight_scale_at + to_up_scale))[:, None, :]
            product = tl.reshape(tl.dot(x_tile, tl.trans(weight_tile)), (ROWS, COLUMNS // 2, 2)) * both
            total += tl.reshape(product, (ROWS, COLUMNS))
        else:
            total += tl.dot(x_tile, tl.trans(weight_tile)) * (scale * weight_scale)[:, None]
        x_at += _BLOCK
        weight_at += _BLOCK
        weight_scale_at += 1
    return total


@triton.jit
def multiply_block_scaled_tile(
    x, source_row, inside, group, start, weight_row, operands, x_stride, width, inner, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    x_scale, x_scale_stride, weight, weight_scale = operands
    WHOLE: tl.constexpr = CONSTANTS[0]
    SWAPPED: tl.constexpr = CONSTANTS[1]
    blocks, row_blocks = tl.cdiv(inner, _BLOCK), tl.cdiv(width, _BLOCK)
    depth = tl.arange(0, _BLOCK)[None, :]
    source_row, group = source_row.to(tl.int64), group.to(tl.int64)
    if GATED:
        group *= 2  # gate, then up
    total = block_products(
        x + source_row[:, None] * x_stride + depth, x_scale + source_row * x_scale_stride, inside,
        weight + weight_row[:, None] * inner + depth, weight_scale + (group * row_blocks + start // _BLOCK) * blocks,
        0, blocks, inner, row_blocks * blocks, ROWS, COLUMNS, WHOLE, SWAPPED, GATED,
    )  # fmt: skip
    if SWAPPED:
        total = tl.trans(total)
    return total


@triton.jit
def block_scaled_experts_kernel(
    x, source, row_ends, x_scale, x_scale_stride, weight, weight_scale, out_scale, out, x_stride, width, inner, groups,
    GATHER: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SWAPPED: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """With ``out_scale`` the result is quantised into ``out``."""
    multiply_groups(
        x, source, row_ends, (x_scale, x_scale_stride, weight, weight_scale), out, out_scale, x_stride, width, inner,
        groups, multiply_block_scaled_tile, (WHOLE, SWAPPED, POWER_OF_TWO, CONVERTS), GATHER, GATED, ROWS, COLUMNS,
        BAND, GROUPS_PAD,
    )  # fmt: skip


# As in block_scaled_matmul.py. Gated, a tile is a block of gate and one of up in one product: its warpgroups take 128
# columns each and read the rows half as often as for one weight after the other.
# Compiled for sm_90, sm_100 and sm_120 (inspect_kernels.py), not yet measured on a device.
_GATED = {
    89: (Tiles(16, 256, 128, 8, 2, 1), Tiles(64, 256, 128, 8, 3, 1)),
    90: (Tiles(16, 256, 128, 4, 3, 2, swapped=True), Tiles(64, 256, 128, 8, 4, 1)),
    100: (Tiles(16, 256, 128, 8, 3, 2, swapped=True), Tiles(64, 256, 128, 8, 4, 1)),
}
_PLAIN = {
    89: (Tiles(16, 64, 128, 4, 3, 3), Tiles(64, 128, 128, 8, 3, 1)),
    90: (Tiles(16, 128, 128, 4, 4, 3, swapped=True), Tiles(64, 128, 128, 4, 4, 2), Tiles(128, 128, 128, 8, 4, 1)),
}
_GATED[120], _PLAIN[120] = _GATED[89], _PLAIN[89]  # products by single warps, and 99 KB of shared memory


def _launch(
    x: torch.Tensor, x_scale: torch.Tensor, source: torch.Tensor | None, row_ends: torch.Tensor, weight: torch.Tensor,
    weight_scale: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor | None, expected: float, power_of_two: bool,
) -> None:  # fmt: skip
    """Launches the kernel; with ``out_scale`` the results are gated and quantised into ``out``."""
    gated = out_scale is not None
    tiles = fitting(config_for(_GATED if gated else _PLAIN, x), expected / len(row_ends))
    launch_grouped(
        block_scaled_experts_kernel, tiles, x, source, row_ends,
        (x_scale, x_scale.stride(0), weight, weight_scale, out_scale), out.view(torch.uint8) if gated else out,
        gated=gated, WHOLE=x.shape[1] % BLOCK == 0, SWAPPED=tiles.swapped, POWER_OF_TWO=power_of_two,
        CONVERTS=converts_e4m3(x),
    )  # fmt: skip


def gate_and_up(
    x: torch.Tensor, x_scale: torch.Tensor, source: torch.Tensor, row_ends: torch.Tensor, weight: torch.Tensor,
    weight_scale: torch.Tensor, *, power_of_two: bool, expected: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The kernel's first product: gathered rows by gate and up, gated, quantised.

    Args:
        x, x_scale: codes ``[S, in]`` and scales ``[S, ceil(in / 128)]``, with any row strides.
        source: int32 ``[R]``, the row of ``x`` that each row is made from.
        row_ends: int32 ``[groups]``, the index after the last row of each group.
        weight, weight_scale: ``[groups, 2, width, in]`` codes and ``[groups, 2, …]`` scales.
        power_of_two: whether the result's scales are powers of two.
        expected: number of served rows, as far as the host knows; chooses tiles only.

    Returns:
        Codes ``[R, width]`` and scales ``[R, ceil(width / 128)]``; rows beyond the last group hold anything.
    """
    rows, width = source.shape[0], weight.shape[2]
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, cdiv(width, BLOCK), device=x.device)
    if rows:
        expected = rows if expected is None else expected
        _launch(x, x_scale, source, row_ends, weight, weight_scale, out, scales, expected, power_of_two)
    return out, scales


def grouped_product(
    x: torch.Tensor, x_scale: torch.Tensor, row_ends: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    dtype: torch.dtype, expected: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The kernel's second product: rows ``x [R, in]``, sorted by group, by ``weight [groups, out, in]``; ``[R, out]``
    in ``dtype``. Rows beyond the last group hold anything."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=dtype, device=x.device)
    if out.numel():
        expected = x.shape[0] if expected is None else expected
        _launch(x, x_scale, None, row_ends, weight, weight_scale, out, None, expected, False)
    return out
