"""Products of FP8 matrices whose scales belong to blocks: activations 1 × 128, weights 128 × 128.

    y[r, n] = Σ_b  x_scale[r, b] · weight_scale[n // 128, b] · Σ_{k in block b}  x[r, k] · weight[n, k]

    x             [R, in]                                  float8_e4m3fn
    x_scale       [R, ceil(in / 128)]                      float32
    weight        [out, in]                                float8_e4m3fn
    weight_scale  [ceil(out / 128), ceil(in / 128)]        float32

Both sums are float32 (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2). Hopper's tensor cores add FP8
products with fewer bits than that, so every block of 128 begins a new sum, which is scaled and added by ordinary
arithmetic. Blocks at the edges may be partial.

Bits of a row: they depend on the row, the weight, and the tiles and splits that the number of rows chooses; under
:func:`.launch.batch_invariance` tiles are fixed and no sum is split.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.quantize import quantize_rows, quantized_words
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import (
    BLOCK,
    block_products,
    block_scaled_matmul_reference,
    check_weight,
)
from dsa_engine.kernels.grouped.products import Tiles, fitting
from dsa_engine.kernels.grouped.skeleton import banded
from dsa_engine.kernels.linear.linear import FEW_ROWS_ON_A_CPU, run_native
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import Chip, chip_of, config_for, is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

_BLOCK = tl.constexpr(BLOCK)

# Largest number of rows whose time is that of reading the weights: they take our kernel, where many programs share a
# sum.
FEW_ROWS = 64

# Largest number of rows that each program of our kernel quantises for itself: those of the smallest tile. More rows are
# quantised once, by a kernel of their own: by each program they would be read in 16 bits, half as many bytes as the
# weight or more.
QUANTISED_ROWS = 16


@kernel(do_not_specialize=["scale_stride"])
def block_scaled_matmul_kernel(
    x, x_scale, weight, weight_scale, out, parts, finished, rows, width, inner, x_stride, scale_stride, part_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr, BAND: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """A tile [ROWS, COLUMNS] a program. With ``parts [splits, rows, width]`` there are ``splits`` along the second axis
    of the grid, each of which sums a part of the inner dimension into its own matrix; the last to finish of those of a
    tile adds them. Without ``x_scale`` x holds numbers."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(width, COLUMNS)
    row_tile, column_tile = banded(tl.program_id(0), row_tiles, column_tiles, BAND)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    start = column_tile * COLUMNS
    blocks = tl.cdiv(inner, _BLOCK)
    begin = blocks * tl.program_id(1) // tl.num_programs(1)
    end = blocks * (tl.program_id(1) + 1) // tl.num_programs(1)

    inside = row < rows
    far_row = tl.minimum(row, rows - 1).to(tl.int64)
    # Columns beyond the last repeat it and are not stored: weights need no mask there.
    weight_row = tl.minimum(start + tl.arange(0, COLUMNS), width - 1).to(tl.int64)
    depth = begin * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x_scale_at = None
    if x_scale is not None:
        x_scale_at = x_scale + far_row * scale_stride + begin
    total = block_products(
        x + far_row[:, None] * x_stride + depth, x_scale_at, inside,
        weight + weight_row[:, None] * inner + depth, weight_scale + start // _BLOCK * blocks + begin,
        begin, end, inner, 0, ROWS, COLUMNS, WHOLE, SWAPPED, False, POWER_OF_TWO, CONVERTS,
    )  # fmt: skip
    if SWAPPED:
        total = tl.trans(total)
    column = start + tl.arange(0, COLUMNS)[None, :]
    at, stored = far_row[:, None] * width + column, inside[:, None] & (column < width)
    if parts is None:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)
    else:
        splits = tl.num_programs(1)
        tl.store(parts + tl.program_id(1).to(tl.int64) * part_stride + at, total, mask=stored)
        tl.debug_barrier()  # one thread counts, after the stores of all
        # It acquires and releases: the last program sees what all others have stored.
        if tl.atomic_add(finished + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == splits - 1:
            total = _added(parts + at, stored, splits, part_stride, ROWS, COLUMNS)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)
            tl.store(finished + tl.program_id(0), 0)  # for the next product


@triton.jit
def _added(part_at, stored, splits, part_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of a tile's parts, ``part_stride`` elements apart, in order. Small ones are loaded together."""
    together: tl.constexpr = 8 if ROWS <= 16 else 1
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, splits, together):
        for split in tl.static_range(together):
            # Not masked beyond the last: the compiler would load one after another.
            number = tl.minimum(first + split, splits - 1).to(tl.int64)
            part = tl.load(part_at + number * part_stride, mask=stored, other=0.0)
            total += tl.where(first + split < splits, part, 0.0)
    return total


# By capability: the first with room for the rows is taken, else the last. Few rows: reading the weights takes the
# time, and a multiprocessor has 96 KB of them in flight. Many: a block's sum and the whole sum are both in
# registers, so tiles are half of what bfloat16 takes.
_CONFIGS = {
    89: (Tiles(16, 64, 128, 4, 3, 3), Tiles(64, 128, 128, 8, 3, 1)),
    90: (Tiles(16, 128, 128, 4, 3, 3, swapped=True), Tiles(64, 128, 128, 4, 4, 2), Tiles(128, 128, 128, 8, 4, 1)),
}
_CONFIGS[120] = _CONFIGS[89]  # products by single warps, and 99 KB of shared memory


def splits_for(tiles: int, blocks: int, resident: int) -> int:
    """Number of programs that share a tile's inner dimension, so that ``tiles`` tiles keep ``resident`` programs busy;
    each has at least 4 blocks."""
    return max(1, min(resident // tiles, blocks // 4))


@lru_cache(maxsize=4096)
def _plan(rows: int, width: int, inner: int, chip: Chip, fixed: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a product, whose second size is the number of splits, and the constants that follow from its shape;
    ``fixed``: under :func:`.launch.batch_invariance`."""
    tiles = fitting(config_for(_CONFIGS, chip), rows)
    count = cdiv(rows, tiles.rows) * cdiv(width, tiles.columns)
    splits = splits_for(count, cdiv(inner, BLOCK), 1 if fixed else tiles.resident * chip.multiprocessors)
    return (count, splits), {
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "WHOLE": inner % BLOCK == 0, "SWAPPED": tiles.swapped, "BAND": 16,
        "CONVERTS": chip.converts_e4m3, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def no_program_finished(like: torch.Tensor) -> torch.Tensor:
    """Zeros int32, in which the programs of a product on the device of ``like`` are counted that share a tile's sum.

    A product leaves zeros there. Products that may run at the same time need their own.
    """
    resident = max(tiles.resident for tiles in config_for(_CONFIGS, chip_of(like)))
    # A sum has several parts only if two programs of each tile are resident at once (splits_for).
    return torch.zeros(resident * chip_of(like).multiprocessors // 2, dtype=torch.int32, device=like.device)


def block_scaled_matmul_triton(
    x: torch.Tensor, x_scale: torch.Tensor | None, weight: torch.Tensor, weight_scale: torch.Tensor,
    dtype: torch.dtype, power_of_two: bool = False, finished: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The kernel; ``[R, out]`` in ``dtype``. Results do not depend on how many rows are multiplied at once, as far as
    these take the same tiles.

    Without ``x_scale`` x holds numbers, and each program quantises its rows as :func:`~.formats.quantize.quantize_rows`
    does: to the same bits.
    """
    (rows, inner), width = x.shape, weight.shape[0]
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    grid, constants = _plan(rows, width, inner, chip_of(x), is_batch_invariant())
    parts = None if grid[1] == 1 else torch.empty(grid[1], rows, width, device=x.device)
    if parts is not None and finished is None:
        finished = no_program_finished(x)
    block_scaled_matmul_kernel[grid](
        x, x_scale, weight, weight_scale, out, parts, finished, rows, width, inner, x.stride(0),
        0 if x_scale is None else x_scale.stride(0), rows * width, POWER_OF_TWO=power_of_two, **constants,
    )  # fmt: skip
    return out


def packs_scales(like: torch.Tensor) -> bool:
    """Whether a library may pack scales as ue8m0 on the device of ``like``."""
    return chip_of(like).capability >= 100


def are_powers_of_two(scales: torch.Tensor) -> bool:
    """Whether float32 ``scales`` are powers of two, or 0; waits for the device."""
    return bool((scales.view(torch.int32) & 0x807FFFFF == 0).all())


def multiplies_fp8(device: torch.device) -> bool:
    """Whether a device has FP8 tensor cores."""
    return device.type == "cuda" and chip_of(torch.empty(0, device=device)).capability >= 89


def _quantises_itself(rows: torch.Tensor) -> bool:
    """Whether our kernel is to quantise these rows as it multiplies them."""
    return rows.shape[0] <= QUANTISED_ROWS and not is_batch_invariant()


def words_for(rows: torch.Tensor, inner: int) -> torch.Tensor | None:
    """Memory for as many rows of ``inner`` numbers as :func:`.quantize.quantize_tokens` makes them, which are filled as
    the numbers are made and whose codes and scales :func:`block_scaled_linear` takes; None where it quantises rows as
    it multiplies, or numbers do not fill words."""
    width = quantized_words(inner)
    if not runs_triton(rows) or _quantises_itself(rows) or width is None:
        return None
    return torch.empty(rows.shape[0], width, dtype=torch.int32, device=rows.device)


@operation(runs=cpu.runs_kernel)
def block_scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    power_of_two: bool = False,
    weight_power_of_two: bool = False,
    finished: torch.Tensor | None = None,
    quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """A linear layer in FP8: quantises its input 1 × 128 and multiplies.

    Few rows are quantised by the kernel that multiplies them. Many rows of bfloat16 may be multiplied by a library
    (:mod:`dsa_engine.kernels.libraries.block_scaled`).

    Args:
        x: ``[..., in]``, any floating dtype.
        weight: ``[out, in]`` float8_e4m3fn, contiguous.
        weight_scale: ``[ceil(out / 128), ceil(in / 128)]`` float32, contiguous.
        power_of_two: round the scales of ``x`` up to powers of two.
        weight_power_of_two: the scales of the weight are known to be powers of two, which some libraries need.
        finished: :func:`no_program_finished`, if it is kept between calls; else it costs a launch.
        quantized: codes and scales of the rows of ``x``, if there are any; the elements of a row side by side.

    Returns:
        ``[..., out]`` in x's dtype, rounded once.
    """
    check_weight(weight, weight_scale)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if (
        cpu.serves(x)
        and cpu.takes(x.numel(), FEW_ROWS_ON_A_CPU * x.shape[-1])
        and cpu.serves(weight, dtype=weight.dtype)
    ):
        return run_native(x, weight, weight_scale, 4, power_of_two)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    ours = runs_triton(x)
    if ours and _quantises_itself(rows):
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = block_scaled_matmul_triton(rows, None, weight, weight_scale, x.dtype, power_of_two, finished)
    else:
        codes, scales = quantized or quantize_rows(rows, BLOCK, power_of_two)
        if ours:
            out = block_scaled_matmul_triton(codes, scales, weight, weight_scale, x.dtype, finished=finished)
        else:
            out = block_scaled_matmul_reference(codes, scales, weight, weight_scale).to(x.dtype)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])
