"""Products of consecutive groups of rows with INT4 matrices, one for each group, packed in planes (``int4.py``).

out[r] = Σ_c scale[g, :, c] · (code[g, :, c] · x[source[r], c])    for the rows r of group g, c the groups of columns

W4A16 multiplies x in its dtype. W4A8 multiplies INT8 codes of x (``int8.py``), which have a scale for each row.
Weights leave memory packed and are unpacked in registers; each group of columns is summed without scales (in int32, or
exact in the products of W4A16), then scaled in float32. With ``gated`` the halves of a matrix are gate and up of a
SwiGLU layer, and the sums go through it before they are rounded.

With ``columns`` (``actorder: "group"``) column j of a matrix multiplies column ``columns[g, …, j]`` of x. Gate and up
may have different orders: then a tile's product is made with either order, and half of each is taken.

Bits of a row: as of :mod:`.grouped_matmul`.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.int4 import (
    GROUP_SIZES,
    check_groups,
    dequantize_int4,
    planes_for,
    unpack_codes,
    unpack_numbers,
)
from dsa_engine.kernels.formats.int8 import int8_words
from dsa_engine.kernels.grouped.grouped_matmul_int8 import rows_int8
from dsa_engine.kernels.grouped.products import Groups, ProductFormat, Tiles, empty_product, launch_grouped
from dsa_engine.kernels.grouped.skeleton import multiply_groups
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, config_for, dot_precision

# Rows of a matrix that the reference expands at a time.
_REFERENCE_ROWS = 1024


def matmul_int4_reference(
    x: torch.Tensor, x_scale: torch.Tensor | None, packed: torch.Tensor, scale: torch.Tensor,
    columns: torch.Tensor | None, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """``x [R, in]`` by one matrix ``[out, in / 8]``: ``[R, out]``."""
    planes = planes_for(x_scale is not None)
    out = torch.empty(x.shape[0], packed.shape[0], dtype=dtype, device=x.device)
    orders = [None] if columns is None else columns.view(-1, x.shape[1]).unbind()
    for order, *half in zip(orders, *(t.chunk(len(orders)) for t in (packed, scale, out.t())), strict=True):
        rows = (x if order is None else x[:, order]).float()
        for codes, scales, into in zip(*(t.split(_REFERENCE_ROWS) for t in half), strict=True):
            sums = rows @ dequantize_int4(codes, scales, torch.float32, planes).t()
            into.copy_((sums if x_scale is None else sums.mul_(x_scale[:, None])).t())
    return out


@triton.jit
def multiply_int4_tile(
    x, source_row, inside, group, start, weight_row, operands, x_stride, width, inner, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """The product is transposed: weights are the left operand, which a warpgroup's product takes from registers, where
    they are unpacked. A step is one group of SIZE columns."""
    x_scale, x_scale_stride, packed, packed_stride, scale, columns = operands
    CODES: tl.constexpr = CONSTANTS[0]
    SIZE: tl.constexpr = CONSTANTS[1]
    PRECISION: tl.constexpr = CONSTANTS[2]
    ORDERS: tl.constexpr = CONSTANTS[3]
    UNITS: tl.constexpr = SIZE // 2 if CODES else SIZE // 4
    depth = tl.arange(0, SIZE)
    unit = tl.arange(0, UNITS)
    x_row = x + source_row.to(tl.int64)[None, :] * x_stride
    x_at = x_row + depth[:, None]
    column_at = columns + group.to(tl.int64) * ORDERS * inner + depth
    is_gate = (tl.arange(0, COLUMNS) % 2 == 0)[:, None]
    packed_at = packed + weight_row[:, None] * packed_stride + unit[None, :]
    scale_at = scale + weight_row * (inner // SIZE)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for _ in range(0, inner, SIZE):
        if ORDERS:
            x_at = x_row + tl.load(column_at)[:, None]
        x_tile = tl.load(x_at, mask=inside[None, :], other=0)
        units = tl.load(packed_at)
        if CODES:
            weight_tile = unpack_codes(units, COLUMNS, SIZE)
            sums = tl.dot(weight_tile, x_tile, out_dtype=tl.int32).to(tl.float32)
        else:
            weight_tile = unpack_numbers(units, x.dtype.element_ty, COLUMNS, SIZE)
            sums = tl.dot(weight_tile, x_tile, input_precision=PRECISION)
        if ORDERS == 2:
            x_tile = tl.load(x_row + tl.load(column_at + inner)[:, None], mask=inside[None, :], other=0)
            if CODES:
                of_up = tl.dot(weight_tile, x_tile, out_dtype=tl.int32).to(tl.float32)
            else:
                of_up = tl.dot(weight_tile, x_tile, input_precision=PRECISION)
            sums = tl.where(is_gate, sums, of_up)
        total += sums * tl.load(scale_at).to(tl.float32)[:, None]
        x_at += SIZE
        column_at += SIZE
        packed_at += UNITS
        scale_at += 1
    if CODES:
        # Codes of weights were 16 times as large.
        row_scale = tl.load(x_scale + source_row.to(tl.int64) * x_scale_stride, mask=inside, other=0.0)
        total *= row_scale[None, :] * 0.0625
    return tl.trans(total)


@kernel
def grouped_matmul_int4_kernel(
    x, source, row_ends, x_scale, x_scale_stride, packed, packed_stride, scale, columns, out, x_stride, width, inner,
    groups,
    GATHER: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAPPED: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr, CODES: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr, ORDERS: tl.constexpr,
):  # fmt: skip
    """CODES: x holds INT8 codes. ``packed`` is read by the unit of its planes: 8 bits with CODES, else 16. ORDERS: the
    orders of columns of a group's matrix: 0 where x is read in order, 1, or 2 of gate and of up. WHOLE, DEPTH and
    SWAPPED are not used: a step is SIZE columns."""
    multiply_groups(
        x, source, row_ends, (x_scale, x_scale_stride, packed, packed_stride, scale, columns), out, None, x_stride,
        width, inner, groups, multiply_int4_tile, (CODES, SIZE, PRECISION, ORDERS), GATHER, GATED, ROWS, COLUMNS, BAND,
        GROUPS_PAD,
    )  # fmt: skip


# By capability: the first with room for a group's rows is taken, else the last. A step is a group of columns,
# whatever the depth says.
_CONFIGS = {
    80: (Tiles(16, 64, 1, 4, 4, 2), Tiles(64, 64, 1, 4, 3, 2), Tiles(128, 64, 1, 8, 3, 1)),
    90: (Tiles(16, 64, 1, 4, 4, 2), Tiles(64, 128, 1, 8, 3, 1), Tiles(128, 128, 1, 8, 3, 1)),
}
_CONFIGS[120] = _CONFIGS[80]  # products by single warps, and 99 KB of shared memory
# For INT8 codes, which Triton multiplies on sm_100 as on sm_80.
_CODES = _CONFIGS | {100: _CONFIGS[80]}
# For float32, which has no tensor cores.
_SMALL = {80: (Tiles(16, 64, 1, 4, 2, 2), Tiles(32, 64, 1, 8, 2, 1))}


def grouped_matmul_int4(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    packed: torch.Tensor,
    scale: torch.Tensor,
    columns: torch.Tensor | None,
    groups: Groups,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The kernel: rows are gathered, and results scaled and gated, on the way.

    Args:
        x: ``[S, in]``: floating point, or int8 codes.
        x_scale: float32, one for each row of x, with any stride; None where x is floating point.
        packed: int32 ``[groups, out, in / 8]``, in 2 planes for codes and else in 4; gated: ``[groups, 2 · out,
            in / 8]``, gate before up.
        scale: floating point ``[groups, out, in / size]``, or with 2 · out rows.
        columns: int32 ``[groups, in]``, or gated ``[groups, 2, in]`` of gate and of up: the column of x that each
            column of a matrix multiplies; None: the same column.
        dtype: dtype of the result.

    Returns:
        ``[R, out]``; rows beyond the last end are not written.
    """
    out = empty_product(x, packed, groups, dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = x_scale is not None
    choices = config_for(_CODES if codes else _SMALL if x.dtype == torch.float32 else _CONFIGS, chip_of(x))
    units = packed.contiguous().view(torch.uint8 if codes else torch.int16)
    orders = 0 if columns is None else columns.numel() // (len(packed) * x.shape[1])
    order = groups.row_ends if columns is None else columns.contiguous()
    scales = x if x_scale is None else x_scale
    operands = (scales, scales.stride(0), units, units.shape[2], scale.contiguous(), order)
    launch_grouped(
        grouped_matmul_int4_kernel, choices, x, operands, out, groups, CODES=codes,
        SIZE=x.shape[1] // scale.shape[2], PRECISION=dot_precision(x.dtype), ORDERS=orders,
    )  # fmt: skip
    return out


def check_int4(
    x: torch.Tensor, x_scale: torch.Tensor | None, packed: torch.Tensor, scale: torch.Tensor, *_: torch.Tensor | None
) -> None:
    """Raises ``TypeError`` or ``ValueError`` for operands of other types, or that do not fit."""
    if packed.dtype != torch.int32 or not scale.is_floating_point():
        raise TypeError(
            f"weights must be packed in int32 with floating-point scales, not {packed.dtype}, {scale.dtype}"
        )
    if x.dtype != torch.int8 if x_scale is not None else not x.is_floating_point():
        raise TypeError(f"x must be floating point, or int8 codes with scales, not {x.dtype}")
    fits = x.dim() == 2 and packed.dim() == 3 and scale.dim() == 3 and x.shape[1] == packed.shape[2] * 8
    if not fits or scale.shape[:2] != packed.shape[:2] or x.shape[1] % max(1, scale.shape[2]):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(packed.shape)}, its scales {tuple(scale.shape)} do not fit"
        )
    check_groups(x.shape[1], x.shape[1] // max(1, scale.shape[2]))


def _with_no_scales(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
    return x, None


def _fits(codes: torch.Size, scales: torch.Size) -> bool:
    return codes[:-1] == scales[:-1] and 8 * codes[-1] in [size * scales[-1] for size in GROUP_SIZES]


_INT4 = partial(
    ProductFormat, check=check_int4, product=grouped_matmul_int4, reference=matmul_int4_reference, packed=8,
    codes=torch.int32, fits=_fits,
)  # fmt: skip
W4A16 = _INT4(_with_no_scales, native=5)
W4A8 = _INT4(rows_int8, native=6, to_words=int8_words)
