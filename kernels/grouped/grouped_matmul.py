"""Matrix products of consecutive groups of rows, each group with its own matrix.

out[r] = weight[g] · x[source[r]]   for rows r of group g,  row_ends[g − 1] <= r < row_ends[g];  source[r] = r if absent

With ``gated`` the halves of a matrix are gate and up of a SwiGLU layer, and the sums go through it before they are
rounded:  out[r] = silu(gate[g] · x[source[r]]) · (up[g] · x[source[r]]).

The ends of the groups stay on the device, where each program computes which tiles it takes.

Bits of a row: they depend on the row, its matrix, and the tiles and the library that its number of rows chooses; under
:func:`.launch.batch_invariance` these are fixed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsa_engine.kernels.grouped.products import Groups, ProductFormat, Tiles, empty_product, launch_grouped
from dsa_engine.kernels.grouped.skeleton import multiply_groups, sum_tile
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, config_for, dot_precision, is_batch_invariant

# Largest average number of rows of a group for which products are bound by reading the weights.
FEW_ROWS = 64


def matmul_reference(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x [R, in]`` by one matrix ``[out, in]``."""
    return cpu.multiply(x, weight.t(), x.new_empty(len(x), len(weight), dtype=dtype))


@triton.jit
def multiply_tile(
    x, source_row, inside, group, start, weight_row, operands, x_stride, width, inner, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = CONSTANTS[0]
    DEPTH: tl.constexpr = CONSTANTS[1]
    SWAPPED: tl.constexpr = CONSTANTS[2]
    PRECISION: tl.constexpr = CONSTANTS[3]
    total = sum_tile(
        x, source_row, inside, operands[0], weight_row, x_stride, inner, tl.float32, WHOLE, ROWS, COLUMNS, DEPTH,
        SWAPPED, PRECISION,
    )  # fmt: skip
    if SWAPPED:
        total = tl.trans(total)
    return total


@kernel
def grouped_matmul_kernel(
    x, source, row_ends, weight, out, x_stride, width, inner, groups,
    GATHER: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAPPED: tl.constexpr, BAND: tl.constexpr, GROUPS_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    multiply_groups(
        x, source, row_ends, (weight,), out, None, x_stride, width, inner, groups, multiply_tile,
        (WHOLE, DEPTH, SWAPPED, PRECISION), GATHER, GATED, ROWS, COLUMNS, BAND, GROUPS_PAD,
    )  # fmt: skip


# By capability: the first with room for a group's rows is taken, else the last. Few rows: reading the weights takes
# the time, so programs are small and each has 48 KB of weights in flight. Many: 128 × 256, the largest tile
# that 8 warps can sum up in registers, with products by warpgroup (Hopper).
_CONFIGS = {
    80: (Tiles(16, 64, 128, 4, 4, 2), Tiles(64, 128, 64, 4, 3, 3), Tiles(128, 128, 64, 8, 3, 1)),
    90: (Tiles(16, 64, 128, 4, 4, 2, swapped=True), Tiles(64, 128, 64, 4, 4, 2), Tiles(128, 256, 64, 8, 4, 1)),
}
_CONFIGS[120] = _CONFIGS[80]  # products by single warps, and 99 KB of shared memory
# For float32, which has no tensor cores, and for rows that do not begin at 16 bytes, which are read by the element.
_SMALL = {80: (Tiles(16, 64, 32, 4, 3, 4), Tiles(64, 64, 32, 8, 3, 2))}


def _choices(x: torch.Tensor) -> tuple[Tiles, ...]:
    """Tiles for products with rows like those of ``x``, by the number of rows in a group."""
    lengths = (x.shape[1],) if is_batch_invariant() else (x.shape[1], x.stride(0))
    aligned = all(length * x.element_size() % 16 == 0 for length in lengths)
    return config_for(_CONFIGS if x.element_size() == 2 and aligned else _SMALL, chip_of(x))


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """The products in the dtype of x: PyTorch's ``grouped_mm`` for many rows where it applies, as it is not yet
    measured that the kernel here is faster; else the kernel, which gathers rows and gates results on the way.

    Args:
        x: ``[S, in]``, any row stride.
        weight: ``[groups, out, in]``; gated: ``[groups, 2 · out, in]``, gate before up.

    Returns:
        ``[R, out]``; rows beyond the last end hold anything.
    """
    rows = len(x if groups.source is None else groups.source)
    expected = rows if groups.expected is None else groups.expected
    # PyTorch's way also gathers and gates the rows of other ranks' pairs: many, where they were not counted.
    if expected > FEW_ROWS * len(weight) and rows <= 2 * expected and takes_torch_grouped_mm(x, weight):
        return grouped_matmul_torch(x, weight, groups)
    return grouped_matmul_triton(x, weight, groups)


def grouped_matmul_triton(
    x: torch.Tensor, weight: torch.Tensor, groups: Groups, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The kernel, in ``dtype`` or that of x; rows beyond the last end are not written."""
    check(x, weight)
    out = empty_product(x, weight, groups, dtype or x.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    operands, precision = (weight.contiguous(),), dot_precision(x.dtype)
    launch_grouped(grouped_matmul_kernel, _choices(x), x, operands, out, groups, PRECISION=precision)
    return out


def check(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ``ValueError`` unless x ``[S, in]`` and ``weight [groups, out, in]`` fit."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.dtype}")


def takes_torch_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch's own grouped product applies: on sm_90 or sm_100, in bfloat16, with strides of 16 bytes.
    On other chips it copies the ends of the groups to the host, which a CUDA graph does not allow."""
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    there = x.is_cuda and chip_of(x).capability // 10 in (9, 10)
    return there and not is_batch_invariant() and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def grouped_matmul_torch(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """PyTorch's product, if :func:`takes_torch_grouped_mm`: gathered rows, and gate and up, are written and read."""
    x = x.contiguous() if groups.source is None else x.index_select(0, groups.source)
    out = F.grouped_mm(x, weight.transpose(1, 2), offs=groups.row_ends)
    del x  # the gathered rows are not held while the results are gated
    return silu_mul(out) if groups.gated else out


def _as_they_are(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x,)


PLAIN = ProductFormat(_as_they_are, check, grouped_matmul, matmul_reference, copies=2)
