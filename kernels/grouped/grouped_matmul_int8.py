"""INT8 products of consecutive groups of rows, each group with its own matrix; one group is a linear layer.

out[r] = x_scale[s] · scale[g] · (weight[g] · x[s])    for the rows r of group g,  row_ends[g − 1] <= r < row_ends[g]

with s = source[r], or r without a source. Codes are multiplied and summed in int32, without error; scales are one for
each row of x and one for each row of a matrix. With ``gated`` the halves of a matrix are gate and up of a SwiGLU layer,
and the sums go through it before they are rounded. Bits of a row: as of :mod:`.grouped_matmul`; sums of codes are
exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.int8 import codes_and_scale, int8_words, quantize_rows_int8
from dsa_engine.kernels.grouped.products import Groups, ProductFormat, Tiles, empty_product, launch_grouped
from dsa_engine.kernels.grouped.skeleton import multiply_groups, sum_tile
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, config_for

# Rows of x that the reference multiplies at a time: their sums take 4 bytes, and 4 more on the way to the result.
_REFERENCE_ROWS = 4096


def matmul_int8_reference(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``x [R, in]`` by one matrix ``[out, in]``: ``[R, out]``."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    if not out.numel():
        return out
    pieces = cdiv(x.shape[0], _REFERENCE_ROWS)  # about as many rows each: on CUDA PyTorch's product refuses 16 or fewer
    for part, rows, row_scale in zip(*(t.chunk(pieces) for t in (out, x, x_scale)), strict=True):
        part.copy_(torch._int_mm(rows, weight.t()).float().mul_(row_scale[:, None]).mul_(scale))
    return out


@triton.jit
def multiply_int8_tile(
    x, source_row, inside, group, start, weight_row, operands, x_stride, width, inner, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    x_scale, x_scale_stride, weight, scale = operands
    WHOLE: tl.constexpr = CONSTANTS[0]
    DEPTH: tl.constexpr = CONSTANTS[1]
    SWAPPED: tl.constexpr = CONSTANTS[2]
    total = sum_tile(
        x, source_row, inside, weight, weight_row, x_stride, inner, tl.int32, WHOLE, ROWS, COLUMNS, DEPTH, SWAPPED,
        "tf32",
    )  # fmt: skip
    row_scale = tl.load(x_scale + source_row.to(tl.int64) * x_scale_stride, mask=inside, other=0.0)
    column_scale = tl.load(scale + weight_row)
    if SWAPPED:
        total = tl.trans(total)
    return total.to(tl.float32) * row_scale[:, None] * column_scale[None, :]


@kernel
def grouped_matmul_int8_kernel(
    x, source, row_ends, x_scale, x_scale_stride, weight, scale, out, x_stride, width, inner, groups,
    GATHER: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAPPED: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr,
):  # fmt: skip
    multiply_groups(
        x, source, row_ends, (x_scale, x_scale_stride, weight, scale), out, None, x_stride, width, inner, groups,
        multiply_int8_tile, (WHOLE, DEPTH, SWAPPED), GATHER, GATED, ROWS, COLUMNS, BAND, GROUPS_PAD,
    )  # fmt: skip


# By capability: the first with room for a group's rows is taken, else the last. A byte a weight: twice the depth of
# bfloat16 keeps as many bytes in flight.
_CONFIGS = {
    80: (Tiles(16, 64, 256, 4, 4, 2), Tiles(64, 128, 128, 4, 3, 3), Tiles(128, 128, 128, 8, 3, 1)),
    90: (Tiles(16, 64, 256, 4, 4, 2, swapped=True), Tiles(64, 128, 128, 4, 4, 2), Tiles(128, 256, 128, 8, 4, 1)),
}
# On sm_100 Triton multiplies INT8 as on sm_80; there is room for a stage more.
_CONFIGS[100] = (_CONFIGS[80][0], Tiles(64, 128, 128, 4, 4, 2), Tiles(128, 128, 128, 8, 4, 1))
# For rows that do not begin at 16 bytes, which are read by the element.
_SMALL = {80: (Tiles(16, 64, 64, 4, 3, 4), Tiles(64, 64, 64, 8, 3, 2))}


def grouped_matmul_int8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    groups: Groups,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The kernel: rows are gathered, and results scaled and gated, on the way.

    Args:
        x: int8 ``[S, in]``, with any row stride.
        x_scale: float32, one for each row of x, with any stride.
        weight: int8 ``[groups, out, in]``; gated: ``[groups, 2 · out, in]``, gate before up.
        scale: float32, one for each row of each matrix.
        dtype: dtype of the result.

    Returns:
        ``[R, out]``; rows beyond the last end are not written.
    """
    out = empty_product(x, weight, groups, dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    choices = config_for(_CONFIGS if x.shape[1] % 16 == 0 and x.stride(0) % 16 == 0 else _SMALL, chip_of(x))
    operands = (x_scale, x_scale.stride(0), weight.contiguous(), scale.contiguous())
    launch_grouped(grouped_matmul_int8_kernel, choices, x, operands, out, groups)
    return out


def check_int8(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises ``TypeError`` or ``ValueError`` for operands that are not int8 with float32 scales, or do not fit."""
    if x.dtype != torch.int8 or weight.dtype != torch.int8:
        raise TypeError(f"codes must be int8, not {x.dtype} and {weight.dtype}")
    if x_scale.dtype != torch.float32 or scale.dtype != torch.float32:
        raise TypeError(f"scales must be float32, not {x_scale.dtype} and {scale.dtype}")
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2]
    if not fits or x_scale.shape != x.shape[:1] or scale.shape != weight.shape[:2]:
        raise ValueError(
            f"x {tuple(x.shape)}, its scales {tuple(x_scale.shape)}, weight {tuple(weight.shape)}, "
            f"its scales {tuple(scale.shape)} do not fit"
        )


def rows_int8(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows, or of words (:func:`.int8.int8_words`)."""
    return codes_and_scale(x) if x.dtype == torch.int32 else quantize_rows_int8(x, largest)


INT8 = ProductFormat(
    rows_int8, check_int8, grouped_matmul_int8, matmul_int8_reference, native=3, codes=torch.int8,
    fits=lambda codes, scales: codes[:-1] == scales, to_words=int8_words,
)  # fmt: skip
