"""Matrix products of consecutive groups of rows, each group with its own matrix.

out[r] = weight[g] · x[source[r]]   for rows r of group g,  row_ends[g − 1] <= r < row_ends[g];  source[r] = r if absent

With ``gated`` the halves of a matrix are gate and up of a SwiGLU layer, and the sums go through it before they are
rounded:  out[r] = silu(gate[g] · x[source[r]]) · (up[g] · x[source[r]]).

The ends of the groups stay on the device, where each program computes which tiles it takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsa_engine.kernels.grouped.skeleton import multiply_groups, sum_tile
from dsa_engine.kernels.grouped.tiles import Tiles, empty_product, fitting, launch_grouped, rows_by_group
from dsa_engine.kernels.runtime.launch import capability, config_for, dot_precision, runs_triton
from dsa_engine.kernels.runtime.operation import operation


def grouped_matmul_reference(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    for group, rows in rows_by_group(counts):
        torch.mm(x[rows], weight[group].t(), out=out[rows])
    return out


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


@triton.jit
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
# Compiled for sm_90 and sm_120 (inspect_kernels.py), not yet measured on a device.
_CONFIGS = {
    80: (Tiles(16, 64, 128, 4, 4, 2), Tiles(64, 128, 64, 4, 3, 3), Tiles(128, 128, 64, 8, 3, 1)),
    90: (Tiles(16, 64, 128, 4, 4, 2, swapped=True), Tiles(64, 128, 64, 4, 4, 2), Tiles(128, 256, 64, 8, 4, 1)),
}
_CONFIGS[120] = _CONFIGS[80]  # products by single warps, and 99 KB of shared memory
# For float32, which has no tensor cores, and for rows that do not begin at 16 bytes, which are read by the element.
_SMALL = {80: (Tiles(16, 64, 32, 4, 3, 4), Tiles(64, 64, 32, 8, 3, 2))}


def tiles_for(x: torch.Tensor, rows_per_group: float) -> Tiles:
    """Tiles for products with rows like those of ``x`` and this average number of rows in a group."""
    aligned = all(length * x.element_size() % 16 == 0 for length in (x.shape[1], x.stride(0)))
    choices = config_for(_CONFIGS if x.element_size() == 2 and aligned else _SMALL, x)
    return fitting(choices, rows_per_group)


def grouped_matmul_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    gated: bool = False,
    expected: float | None = None,
) -> torch.Tensor:
    """The kernel: products of groups of rows, with rows gathered and results gated under way.

    Args:
        x: ``[R, in]``, or ``[S, in]`` with ``source``, any row stride.
        weight: ``[groups, out, in]``; with ``gated`` ``[groups, 2 · out, in]``, gate before up.
        row_ends: int32 ``[groups]`` on the device: the index after the last row of each group, at most R.
        source: int32 ``[R]``, the row of x that each row is made from.
        expected: number of served rows, as far as the host knows; R if not given. Chooses tiles only.

    Returns:
        ``[R, out]`` in the dtype of x; rows beyond the last end are not written.
    """
    _check(x, weight, row_ends)
    if row_ends.dtype != torch.int32 or (source is not None and source.dtype != torch.int32):
        raise ValueError(
            f"row_ends and source must be int32, not {row_ends.dtype} and {None if source is None else source.dtype}"
        )
    out = empty_product(x, source, weight, gated, x.dtype)
    if out.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        tiles = tiles_for(x, (out.shape[0] if expected is None else expected) / len(weight))
        launch_grouped(
            grouped_matmul_kernel, tiles, x, source, row_ends, (weight.contiguous(),), out, gated=gated,
            WHOLE=x.shape[1] % tiles.depth == 0, DEPTH=tiles.depth, SWAPPED=tiles.swapped,
            PRECISION=dot_precision(x.dtype),
        )  # fmt: skip
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, per_group: torch.Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or per_group.shape != weight.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, counts or row_ends {tuple(per_group.shape)} do not fit"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, the weight {weight.dtype}")


def torch_has_it(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch's own grouped product applies: on sm_90 or sm_100, in bfloat16, with strides of 16 bytes.
    On other chips it copies the ends of the groups to the host, which a CUDA graph does not allow."""
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    there = x.is_cuda and capability(x) // 10 in (9, 10)
    return there and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def grouped_matmul_torch(x: torch.Tensor, weight: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
    """PyTorch's product, if :func:`torch_has_it`; rows beyond the last end hold anything."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=row_ends)


@operation(waits=True)
def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiplies each group of rows by its own matrix.

    PyTorch's ``grouped_mm`` where it applies, as it is not yet measured that the kernel here is faster; where it does
    not, the kernel; on a CPU a loop over the groups, which is faster than ``grouped_mm`` there.

    Args:
        x: ``[R, in]``, rows sorted by group.
        weight: ``[groups, out, in]``.
        counts: ``[groups]`` integer, rows per group; their sum is R.

    Returns:
        ``[R, out]`` in x's dtype.
    """
    _check(x, weight, counts)
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[1])
    if not runs_triton(x):
        return grouped_matmul_reference(x, weight, counts)
    row_ends = counts.cumsum(0, dtype=torch.int32)
    if torch_has_it(x, weight):
        return grouped_matmul_torch(x.contiguous(), weight, row_ends)
    return grouped_matmul_triton(x, weight, row_ends)
