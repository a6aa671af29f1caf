"""Products of consecutive groups of rows in FP8: activations quantised 1 × 128, weights in 128 × 128 blocks.

    h[r] = silu(gate[g] · x[s]) · (up[g] · x[s])      gated: quantised straight from float32, rounded nowhere between
    y[r] = weight[g] · x[r]                           for the rows r of group g;  s = source[r]

Products are those of `linear/block_scaled_matmul.py`, which has its sums and its definition from here. The kernel
gathers rows, multiplies by gate and up, gates and quantises in one pass: between the two products of an expert a value
is a byte. Bits of a row: as of :mod:`.grouped_matmul`.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import quantize_tile
from dsa_engine.kernels.formats.fp8 import dequantize_blocks_reference
from dsa_engine.kernels.formats.quantize import FP8, codes_and_scales, quantize_rows, quantize_tokens, quantized_words
from dsa_engine.kernels.grouped.products import Groups, ProductFormat, Tiles, empty_product, launch_grouped
from dsa_engine.kernels.grouped.skeleton import multiply_groups
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, config_for

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)

# Elements of a weight that the reference expands at a time: 16 MiB in float32.
_REFERENCE_ELEMENTS = 1 << 22


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[R, in]`` of codes and scales as :func:`~.formats.quantize.quantize_rows` makes them."""
    full = torch.repeat_interleave(scales, BLOCK, dim=-1)[..., : codes.shape[-1]]
    return codes.float().mul_(full)


def block_scaled_matmul_reference(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """The definition; float32 ``[R, out]``."""
    rows = dequantize_rows(x, x_scale)
    out = torch.empty(x.shape[0], weight.shape[0], device=x.device)
    step = max(1, _REFERENCE_ELEMENTS // (BLOCK * weight.shape[1])) * BLOCK
    parts = zip(weight.split(step), weight_scale.split(step // BLOCK), out.split(step, dim=1), strict=True)
    for codes, scales, into in parts:
        into.copy_(rows @ dequantize_blocks_reference(codes, scales, (BLOCK, BLOCK)).t())
    return out


def matmul_fp8_reference(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The definition; of gate and up, ``weight [2, out, in]``, side by side: ``[R, 2 · out]``."""
    matrices = (one.view(-1, *one.shape[-2:]) for one in (weight, weight_scale))
    products = [block_scaled_matmul_reference(x, x_scale, *one) for one in zip(*matrices, strict=True)]
    return torch.cat(products, dim=1).to(dtype)


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
def gate_and_up_products(
    x_at, x_scale_at, rows_inside, gate_at, to_up, gate_scale_at, to_up_scale, blocks, inner,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The bits of :func:`block_products` with GATED: a product for each weight, so that a tile of many rows has
    registers for the sums of both and the products of one. ``to_up``: from an element of gate to that of up."""
    depth = tl.arange(0, _BLOCK)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(blocks):
        mask = rows_inside[:, None]
        if WHOLE:
            gate_tile, up_tile = tl.load(gate_at), tl.load(gate_at + to_up)
        else:
            remaining = (depth < inner - block * _BLOCK)[None, :]
            mask &= remaining
            gate_tile = tl.load(gate_at, mask=remaining, other=0.0)
            up_tile = tl.load(gate_at + to_up, mask=remaining, other=0.0)
        x_tile = tl.load(x_at, mask=mask, other=0.0)
        scale = tl.load(x_scale_at, mask=rows_inside, other=0.0)
        gate_scale, up_scale = tl.load(gate_scale_at), tl.load(gate_scale_at + to_up_scale)
        gate += tl.dot(x_tile, tl.trans(gate_tile)) * (scale * gate_scale)[:, None]
        up += tl.dot(x_tile, tl.trans(up_tile)) * (scale * up_scale)[:, None]
        x_at += _BLOCK
        x_scale_at += 1
        gate_at += _BLOCK
        gate_scale_at += 1
    return tl.reshape(tl.join(gate, up), (ROWS, 2 * COLUMNS))


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
    x_at, x_scale_at = x + source_row[:, None] * x_stride + depth, x_scale + source_row * x_scale_stride
    weight_scale_at = weight_scale + (group * row_blocks + start // _BLOCK) * blocks
    if GATED and ROWS == 128:
        gate_row = tl.minimum(start + tl.arange(0, COLUMNS // 2), width - 1) + group * width
        total = gate_and_up_products(
            x_at, x_scale_at, inside, weight + gate_row[:, None] * inner + depth, tl.cast(width, tl.int64) * inner,
            weight_scale_at, row_blocks * blocks, blocks, inner, ROWS, COLUMNS // 2, WHOLE,
        )  # fmt: skip
    else:
        total = block_products(
            x_at, x_scale_at, inside, weight + weight_row[:, None] * inner + depth, weight_scale_at, 0, blocks, inner,
            row_blocks * blocks, ROWS, COLUMNS, WHOLE, SWAPPED, GATED,
        )  # fmt: skip
    if SWAPPED:
        total = tl.trans(total)
    return total


@kernel
def block_scaled_experts_kernel(
    x, source, row_ends, x_scale, x_scale_stride, weight, weight_scale, out_scale, out, x_stride, width, inner, groups,
    GATHER: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAPPED: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """With ``out_scale`` the result is quantised into ``out``."""
    multiply_groups(
        x, source, row_ends, (x_scale, x_scale_stride, weight, weight_scale), out, out_scale, x_stride, width, inner,
        groups, multiply_block_scaled_tile, (WHOLE, SWAPPED, POWER_OF_TWO, CONVERTS), GATHER, GATED, ROWS, COLUMNS,
        BAND, GROUPS_PAD,
    )  # fmt: skip


# As in block_scaled_matmul.py. Gated, a tile is a block of gate and one of up in one product: its warpgroups take 128
# columns each and read the rows half as often as for one weight after the other. On sm_90 128 rows, with a product for
# each weight, read 0.6 of the bytes that 64 do for a result.
_GATED = {
    89: (Tiles(16, 256, 128, 8, 2, 1), Tiles(64, 256, 128, 8, 3, 1)),
    90: (
        Tiles(16, 256, 128, 4, 3, 2, swapped=True),
        Tiles(64, 256, 128, 8, 4, 1),
        Tiles(128, 256, 128, 8, 4, 1),
    ),
    100: (Tiles(16, 256, 128, 8, 3, 2, swapped=True), Tiles(64, 256, 128, 8, 4, 1)),
}
_PLAIN = {
    89: (Tiles(16, 64, 128, 4, 3, 3), Tiles(64, 128, 128, 8, 3, 1)),
    90: (Tiles(16, 128, 128, 4, 4, 3, swapped=True), Tiles(64, 128, 128, 4, 4, 2), Tiles(128, 128, 128, 8, 4, 1)),
}
_GATED[120], _PLAIN[120] = _GATED[89], _PLAIN[89]  # products by single warps, and 99 KB of shared memory


def grouped_matmul_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    groups: Groups,
    dtype: torch.dtype,
    power_of_two: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The kernel: rows are gathered, and results gated and quantised, on the way.

    Args:
        x, x_scale: codes ``[S, in]`` and scales ``[S, ceil(in / 128)]``, with any row strides.
        weight, weight_scale: codes ``[groups, out, in]`` and scales ``[groups, ceil(out / 128), ceil(in / 128)]``;
            gated: ``[groups, 2, out, in]`` and ``[groups, 2, …]``, gate before up.
        dtype: of the result, unless it is gated.
        power_of_two: whether the scales of a gated result are powers of two.

    Returns:
        ``[R, out]``; gated: codes ``[R, out]`` and scales ``[R, ceil(out / 128)]``. Rows beyond the last end hold
        anything.
    """
    gated, out_scale, chip = groups.gated, None, chip_of(x)
    out = empty_product(x, weight.flatten(1, -2), groups, torch.float8_e4m3fn if gated else dtype)
    if gated:
        out_scale = torch.empty(out.shape[0], cdiv(out.shape[1], BLOCK), device=x.device)
    launch_grouped(
        block_scaled_experts_kernel, config_for(_GATED if gated else _PLAIN, chip), x,
        (x_scale, x_scale.stride(0), weight, weight_scale, out_scale), out.view(torch.uint8) if gated else out, groups,
        POWER_OF_TWO=power_of_two and gated, CONVERTS=chip.converts_e4m3,
    )  # fmt: skip
    return out if out_scale is None else (out, out_scale)


@lru_cache(maxsize=256)
def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    """Shape of the scales of a weight ``[..., out, in]``."""
    return (*shape[:-2], *(cdiv(size, BLOCK) for size in shape[-2:]))


def check_weight(weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    """Raises an error unless :func:`block_scaled_linear` takes ``weight [..., out, in]`` and its scales."""
    if weight.dtype != torch.float8_e4m3fn or weight_scale.dtype != torch.float32:
        raise TypeError(
            f"block-scaled products need float8_e4m3fn weights and float32 scales, not {weight.dtype} and "
            f"{weight_scale.dtype}"
        )
    needed = scales_shape(weight.shape)
    if weight_scale.shape != needed:
        raise ValueError(
            f"scales of a weight {list(weight.shape)} must be {list(needed)}, not {list(weight_scale.shape)}"
        )
    if not weight.is_contiguous() or not weight_scale.is_contiguous():
        raise ValueError("weight and scales must be contiguous")


def _check(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    check_weight(weight, weight_scale)
    if x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")


@cache
def block_fp8(power_of_two: bool, hidden: int) -> ProductFormat:
    """FP8 by blocks, for experts.

    Args:
        power_of_two: round the scales of activations up to powers of two.
        hidden: numbers of a token.
    """
    words = quantized_words(hidden)

    def quantize(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(x, tuple):  # by the gated product
            return x
        if x.dtype != torch.int32:
            return quantize_rows(x, BLOCK, power_of_two)
        if x.shape[1] != words:
            raise ValueError(f"quantised tokens of {hidden} numbers are not {tuple(x.shape)}")
        return codes_and_scales(x, hidden)

    product = partial(grouped_matmul_fp8, power_of_two=power_of_two)
    to_words = None if words is None else partial(quantize_tokens, power_of_two=power_of_two)
    return ProductFormat(
        quantize, _check, product, matmul_fp8_reference, gate_dtype=torch.float32, native=4,
        codes=FP8, power_of_two=power_of_two, to_words=to_words, blockwise=True,
    )  # fmt: skip
