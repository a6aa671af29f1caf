"""Block-wise FP8: one float32 scale per block of ``block_size`` rows and columns of a matrix.

This is the format of released DeepSeek and GLM checkpoints (``NAME.weight`` and ``NAME.weight_scale_inv``)::

    w[i, j] = float32(w_fp8[i, j]) * scale_inv[i // block_rows, j // block_columns]

    weight     [rows, columns]                                              float8_e4m3fn
    scale_inv  [ceil(rows / block_rows), ceil(columns / block_columns)]     float32

Blocks at the lower and right edge may be partial. A rank that keeps a part of a matrix need not cut at block borders:
``start`` is the row and column of the whole where it begins, and ``scale_inv`` then holds the scales of exactly those
blocks that the part touches, so that ``scale_inv[0, 0]`` belongs to ``weight[0, 0]``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import decode_e4m3
from dsa_engine.kernels.formats.quantize import E4M3_MAX, scales_of
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Largest tile of a program: with 4 warps, 4 loads of 16 bytes a thread.
_TILE_ROWS, _TILE_COLUMNS, _WARPS = 64, 128, 4

# Rows that the reference expands in float32 at a time on their way to another dtype.
_REFERENCE_ROWS = 256


def scale_shape(
    shape: tuple[int, int], block_size: tuple[int, int], start: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """Number of blocks, down and across, that a part of ``shape`` touches which begins at ``start`` of the whole
    matrix."""
    rows, columns = (
        (offset % block + size + block - 1) // block
        for size, block, offset in zip(shape, block_size, start, strict=True)
    )
    return rows, columns


def dequantize_blocks_reference(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block_size: tuple[int, int],
    start: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    row_block, column_block = (
        (torch.arange(size, device=weight.device) + offset % block) // block
        for size, block, offset in zip(weight.shape, block_size, start, strict=True)
    )
    columns = scale_inv[:, column_block]  # [row blocks, columns]: small
    if dtype == torch.float32:
        return weight.float().mul_(columns[row_block])
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for part, rows, blocks in zip(*(t.split(_REFERENCE_ROWS) for t in (out, weight, row_block)), strict=True):
        part.copy_(rows.float().mul_(columns[blocks]))
    return out


def quantize_blocks_reference(
    weight: torch.Tensor, block_size: tuple[int, int], power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    block_rows, block_columns = block_size
    down, across = scale_shape((rows, columns), block_size)
    padded = weight.new_zeros(down * block_rows, across * block_columns, dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(down, block_rows, across, block_columns)
    scale = scales_of(blocks.abs().amax(dim=(1, 3)), power_of_two)
    blocks.div_(scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return padded[:rows, :columns].to(torch.float8_e4m3fn), scale


@kernel
def dequantize_blocks_kernel(
    codes, scales, out, rows, columns, row_start, column_start, row_stride, down_tiles, across_tiles,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """A tile of one block a program, so that it has one scale; a block is ``down_tiles · across_tiles`` programs."""
    row_block, column_block = tl.program_id(1) // down_tiles, tl.program_id(0) // across_tiles
    # Indices within the block first: the matrix may begin, and end, inside of one.
    row = tl.program_id(1) % down_tiles * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across_tiles * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < BLOCK_ROWS) & (column < BLOCK_COLUMNS)
    row += row_block * BLOCK_ROWS - row_start
    column += column_block * BLOCK_COLUMNS - column_start
    inside &= (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    row = row.to(tl.int64)
    scale = tl.load(scales + row_block * (tl.num_programs(0) // across_tiles) + column_block)
    values = decode_e4m3(tl.load(codes + row * row_stride + column, mask=inside, other=0), CONVERTS)
    tl.store(out + row * columns + column, (values * scale).to(out.dtype.element_ty), mask=inside)


@operation()
def dequantize_blocks(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block_size: tuple[int, int],
    start: tuple[int, int] = (0, 0),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Expands FP8 blocks.

    Args:
        weight: ``[rows, columns]`` float8_e4m3fn, the whole matrix or a part of it.
        scale_inv: float32, the scales of the blocks that ``weight`` touches (shape: :func:`scale_shape`).
        block_size: rows and columns of a block.
        start: row and column of the whole matrix at which ``weight`` begins; only the offset inside a block matters.
        dtype: dtype of the result; each product is made in float32 and rounded once.

    Returns:
        ``[rows, columns]``, a new tensor on the device of ``weight``.
    """
    _check_matrix("weight", weight, block_size)
    if weight.dtype != torch.float8_e4m3fn or scale_inv.dtype != torch.float32:
        given = f"{weight.dtype} and {scale_inv.dtype}"
        raise TypeError(f"dequantize_blocks needs float8_e4m3fn weights and float32 scales, not {given}")
    if len(start) != 2 or min(start) < 0:
        raise ValueError(f"start must be (row, column), neither negative, not {start}")
    needed = scale_shape((weight.shape[0], weight.shape[1]), block_size, start)
    if tuple(scale_inv.shape) != needed:
        raise ValueError(
            f"scale_inv must be {list(needed)} for a weight {list(weight.shape)} that starts at {list(start)} "
            f"with blocks {list(block_size)}, not {list(scale_inv.shape)}"
        )
    if scale_inv.device != weight.device:
        raise ValueError(f"weight is on {weight.device}, scale_inv on {scale_inv.device}; both must be on one device")
    if weight.is_meta:
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if not runs_triton(weight):
        return dequantize_blocks_reference(weight, scale_inv, block_size, start, dtype)
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    if out.numel():
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        block_rows, block_columns = block_size
        tile_rows = min(_TILE_ROWS, next_power_of_2(block_rows))
        tile_columns = min(_TILE_COLUMNS, next_power_of_2(block_columns))
        down, across = cdiv(block_rows, tile_rows), cdiv(block_columns, tile_columns)
        dequantize_blocks_kernel[(scale_inv.shape[1] * across, scale_inv.shape[0] * down)](
            weight.view(torch.uint8), scale_inv.contiguous(), out, rows, columns,
            start[0] % block_rows, start[1] % block_columns, weight.stride(0), down, across,
            BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, ROWS=tile_rows, COLUMNS=tile_columns,
            CONVERTS=chip_of(weight).converts_e4m3, num_warps=_WARPS,
        )  # fmt: skip
    return out


def quantize_blocks(
    weight: torch.Tensor, block_size: tuple[int, int], power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix to FP8 blocks, each scaled so that its largest magnitude meets the end of the e4m3 range (448).

    Args:
        weight: ``[rows, columns]``, any floating dtype.
        block_size: rows and columns of a block.
        power_of_two: round scales up to powers of two (``scale_fmt: ue8m0`` in released configurations).

    Returns:
        The float8_e4m3fn weight ``[rows, columns]`` and its float32 ``scale_inv`` (shape: :func:`scale_shape`).

    Raises:
        ValueError: ``weight`` is not a matrix or holds NaN or infinity, or a bad block size.
    """
    _check_matrix("weight", weight, block_size)
    if not weight.is_floating_point():
        raise TypeError(f"quantize_blocks needs a floating-point weight, not {weight.dtype}")
    quantized, scale = quantize_blocks_reference(weight, block_size, power_of_two)
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("the weight holds NaN or infinity, which FP8 blocks cannot represent")
    return quantized, scale


def _check_matrix(name: str, tensor: torch.Tensor, block_size: tuple[int, int]) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be a matrix [rows, columns], not {list(tensor.shape)}")
    if len(block_size) != 2 or min(block_size) < 1:
        raise ValueError(f"block_size must be (rows, columns), both positive, not {block_size}")
