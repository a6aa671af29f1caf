"""The experts of one rank in FP8: activations quantised 1 × 128, weights in 128 × 128 blocks.

    h[r] = silu(gate[e] · x[t]) · (up[e] · x[t])      x quantised; sums and gate in float32
    y[r] = down[e] · h[r]                             h quantised straight from float32, rounded nowhere between
    out[t] = Σ_j weight[t, j] · y[r(t, j)]            e = expert[t, j];  −1 stands for nobody here

Products are those of :mod:`.linear.block_scaled_matmul`; rows are sorted by expert as in :mod:`.expert_mlp`. The kernel
gathers rows, multiplies by gate and up, gates and quantises in one pass: between the two products a value is a byte.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import converts_e4m3, quantize_tile
from dsa_engine.kernels.formats.quantize import quantize_rows, quantize_rows_reference
from dsa_engine.kernels.grouped.tiles import (
    banded,
    fitting,
    gate_columns,
    group_tiles,
    most_tiles,
    rows_by_group,
    rows_of_tile,
    rows_read,
    weight_rows,
)
from dsa_engine.kernels.linear.block_scaled_matmul import (
    BLOCK,
    Tiles,
    block_products,
    block_scaled_matmul_reference,
    check_weight,
)
from dsa_engine.kernels.moe.expert_mlp import UNCOUNTED_BYTES, check_choices, served_order, sum_experts_reference
from dsa_engine.kernels.moe.permute import combine
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import config_for, multiprocessors, runs_triton
from dsa_engine.kernels.runtime.operation import operation

_BLOCK = tl.constexpr(BLOCK)


def block_scaled_experts_reference(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, gate_up_scale: torch.Tensor,
    down: torch.Tensor, down_scale: torch.Tensor, power_of_two: bool,
) -> torch.Tensor:  # fmt: skip
    """The definition."""

    def mlp(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        for expert, part in rows_by_group(counts):
            quantized = quantize_rows_reference(rows[part], BLOCK, power_of_two)
            gate, up = (
                block_scaled_matmul_reference(*quantized, *half)
                for half in zip(gate_up[expert], gate_up_scale[expert], strict=True)
            )
            hidden = quantize_rows_reference(F.silu(gate).mul_(up), BLOCK, power_of_two)
            out[part] = block_scaled_matmul_reference(*hidden, down[expert], down_scale[expert])
        return out

    return sum_experts_reference(x, experts, weights, down.shape[0], mlp)


@triton.jit
def block_scaled_experts_kernel(
    x, x_scale, source, ends, weight, weight_scale, out, out_scale, width, inner, groups,
    GATHER: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SWAPPED: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Tiles [ROWS, COLUMNS] of products of groups of rows, each program every so many; ``width`` is that of ``out``.
    With GATED a tile's columns are gate and up in turns, a block of each, and the result is quantised into ``out``."""
    shown: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS  # columns of the result
    starts, ends_here, tiles, upto = group_tiles(ends, groups, ROWS, GROUPS_PAD)
    row_tiles = tl.sum(tiles)
    column_tiles = tl.cdiv(width, shown)
    blocks, row_blocks = tl.cdiv(inner, _BLOCK), tl.cdiv(width, _BLOCK)
    depth = tl.arange(0, _BLOCK)[None, :]
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = banded(tile, row_tiles, column_tiles, BAND)
        start = column_tile * shown
        group, row, inside = rows_of_tile(row_tile, starts, ends_here, tiles, upto, ROWS, GROUPS_PAD)
        place = rows_read(source, row, inside, GATHER).to(tl.int64)
        weight_row = weight_rows(group, start, width, COLUMNS, GATED)
        group, row = group.to(tl.int64), row.to(tl.int64)
        if GATED:
            group *= 2  # gate, then up
        x_at, x_scale_at = x + place[:, None] * inner + depth, x_scale + place * blocks
        weight_at = weight + weight_row[:, None] * inner + depth
        weight_scale_at = weight_scale + (group * row_blocks + start // _BLOCK) * blocks
        total = block_products(
            x_at, x_scale_at, inside, weight_at, weight_scale_at, 0, blocks, inner, row_blocks * blocks, ROWS, COLUMNS,
            WHOLE, SWAPPED, GATED,
        )  # fmt: skip
        if SWAPPED:
            total = tl.trans(total)
        if GATED:
            total = gate_columns(total, ROWS, COLUMNS)
        column = start + tl.arange(0, shown)[None, :]
        at, keep = out + row[:, None] * width + column, inside[:, None] & (column < width)
        if GATED:
            code, scale = quantize_tile(tl.where(column < width, total, 0.0), POWER_OF_TWO, CONVERTS)
            tl.store(at, code, mask=keep)
            tl.store(out_scale + row[:, None] * row_blocks + column_tile, scale, mask=inside[:, None])
        else:
            tl.store(at, total.to(out.dtype.element_ty), mask=keep)


# As in block_scaled_matmul.py. Gated, a tile is a block of gate and one of up in one product: its warpgroups take 128
# columns each and read the rows half as often as for one weight after the other.
# Compiled for sm_90, sm_100 and sm_120 (inspect_kernels.py), not yet measured on a device.
_GATED = {
    89: (Tiles(16, 256, 8, 2, 1), Tiles(64, 256, 8, 3, 1)),
    90: (Tiles(16, 256, 4, 3, 2, swapped=True), Tiles(64, 256, 8, 4, 1)),
    100: (Tiles(16, 256, 8, 3, 2, swapped=True), Tiles(64, 256, 8, 4, 1)),
}
_PLAIN = {
    89: (Tiles(16, 64, 4, 3, 3), Tiles(64, 128, 8, 3, 1)),
    90: (Tiles(16, 128, 4, 4, 3, swapped=True), Tiles(64, 128, 4, 4, 2), Tiles(128, 128, 8, 4, 1)),
}
_GATED[120], _PLAIN[120] = _GATED[89], _PLAIN[89]  # products by single warps, and 99 KB of shared memory


def _launch(
    x: torch.Tensor, x_scale: torch.Tensor, source: torch.Tensor | None, ends: torch.Tensor, weight: torch.Tensor,
    weight_scale: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor, expected: float, power_of_two: bool,
) -> None:  # fmt: skip
    """The kernel: rows of ``x``, or those that ``source`` names, by the matrices of their groups, into ``out``; gated
    and quantised where that is made for codes."""
    (rows, width), (inner, groups) = out.shape, (x.shape[1], ends.shape[0])
    gated = out.dtype == torch.float8_e4m3fn
    choices = config_for(_GATED if gated else _PLAIN, x)
    tiles = fitting(choices, expected / groups)
    most = most_tiles(rows, groups, tiles.rows) * cdiv(width * (1 + gated), tiles.columns)
    block_scaled_experts_kernel[(min(most, tiles.resident * multiprocessors(x)),)](
        x, x_scale, ends if source is None else source, ends, weight, weight_scale,
        out.view(torch.uint8) if gated else out, out_scale, width, inner, groups,
        GATHER=source is not None, GATED=gated, WHOLE=inner % BLOCK == 0, ROWS=tiles.rows, COLUMNS=tiles.columns,
        SWAPPED=tiles.swapped, BAND=16, GROUPS_PAD=next_power_of_2(groups), POWER_OF_TWO=power_of_two,
        CONVERTS=converts_e4m3(x), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def gate_and_up(
    x: torch.Tensor, x_scale: torch.Tensor, source: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor,
    weight_scale: torch.Tensor, *, power_of_two: bool, expected: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The kernel's first product: gathered rows by gate and up, gated, quantised.

    Args:
        x, x_scale: codes ``[S, in]`` and scales ``[S, ceil(in / 128)]``.
        source: int32 ``[R]``, the row of ``x`` that each row is made from.
        ends: int32 ``[groups]``, where the rows of each group end.
        weight, weight_scale: ``[groups, 2, width, in]`` codes and ``[groups, 2, …]`` scales.
        power_of_two: of the result's scales.
        expected: how many rows are served, as far as the host can tell; chooses tiles, nothing else.

    Returns:
        Codes ``[R, width]`` and scales ``[R, ceil(width / 128)]``; rows behind the last end hold anything.
    """
    rows, width = source.shape[0], weight.shape[2]
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, cdiv(width, BLOCK), device=x.device)
    if rows:
        expected = rows if expected is None else expected
        _launch(x, x_scale, source, ends, weight, weight_scale, out, scales, expected, power_of_two)
    return out, scales


def grouped_product(
    x: torch.Tensor, x_scale: torch.Tensor, ends: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
    dtype: torch.dtype, expected: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The kernel's second product: rows ``x [R, in]``, sorted by group, by ``weight [groups, out, in]``; ``[R, out]``
    in ``dtype``. Rows behind the last end hold anything."""
    out = torch.empty(x.shape[0], weight.shape[1], dtype=dtype, device=x.device)
    if out.numel():
        expected = x.shape[0] if expected is None else expected
        _launch(x, x_scale, None, ends, weight, weight_scale, out, x_scale, expected, False)
    return out


@operation()
def block_scaled_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    power_of_two: bool = False,
    served_fraction: float = 1.0,
    served: int | None = None,
    uncounted_bytes: int = UNCOUNTED_BYTES,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token, in FP8.

    Args:
        x, experts, weights, served_fraction, served, uncounted_bytes: as in :func:`.expert_mlp.expert_mlp`.
        gate_up: ``[experts, 2, intermediate, hidden]`` float8_e4m3fn, gate before up.
        gate_up_scale: ``[experts, 2, ceil(intermediate / 128), ceil(hidden / 128)]`` float32.
        down: ``[experts, hidden, intermediate]`` float8_e4m3fn.
        down_scale: ``[experts, ceil(hidden / 128), ceil(intermediate / 128)]`` float32.
        power_of_two: round the scales of activations up to powers of two.

    Returns:
        ``[T, hidden]`` in x's dtype, summed in float32; zeros for a token that has nobody here.

    Raises:
        TypeError, ValueError: dtypes or shapes that do not fit.
    """
    check_choices(x, experts, weights)
    check_weight(gate_up, gate_up_scale)
    check_weight(down, down_scale)
    count, hidden, intermediate = down.shape
    if gate_up.shape != (count, 2, intermediate, hidden) or x.shape[1] != hidden:
        raise ValueError(f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} do not fit")
    if not runs_triton(x):
        return block_scaled_experts_reference(
            x, experts, weights, gate_up, gate_up_scale, down, down_scale, power_of_two
        )
    row_bytes = intermediate + hidden * x.element_size()
    order, expected = served_order(experts, count, row_bytes, served_fraction, uncounted_bytes, served)
    codes, scales = quantize_rows(x, BLOCK, power_of_two)
    codes, scales = gate_and_up(
        codes, scales, order.tokens, order.ends, gate_up, gate_up_scale, power_of_two=power_of_two, expected=expected
    )
    y = grouped_product(codes, scales, order.ends, down, down_scale, x.dtype, expected)
    return combine(y, order.places, weights)
