"""INT4 in groups along a row, packed as ``compressed-tensors`` stores it (``pack-quantized``).

    code                  −8 … 7
    w[i, j]             = scale[i, j // group] · code[i, j]
    packed[i, j // 8]   has  code[i, j] + 8  in its bits  4 · (j mod 8) …,   int32 [rows, columns / 8]

so that, byte by byte, even columns are the low halves and odd columns the high ones.
"""

from __future__ import annotations

import torch

GROUP_SIZES = (32, 64, 128)

# Rows that are unpacked or quantised at a time.
_ROWS = 256

# A group's scale is the best of these times the one that just reaches its largest value: cutting that off a little
# often costs less than coarser steps for all others.
_SHRINK = tuple(1 - i / 32 for i in range(13))


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 ``[rows, columns]`` within −8 … 7, columns in eights, to int32 ``[rows, columns / 8]``."""
    if codes.shape[-1] % 8:
        raise ValueError(f"rows of {codes.shape[-1]} columns cannot be packed in eights")
    halves = (codes + 8).view(torch.uint8)
    return (halves[:, ::2] | halves[:, 1::2] << 4).contiguous().view(torch.int32)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 ``[rows, columns / 8]`` to int8 ``[rows, columns]``."""
    halves = packed.contiguous().view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2).view(torch.int8) - 8


def dequantize_int4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Expands a packed matrix, some rows at a time.

    Args:
        packed: int32 ``[rows, columns / 8]``.
        scale: ``[rows, columns / group]``, floating point.
        dtype: of the result; each product is made in float32 and rounded once.

    Returns:
        ``[rows, columns]``.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 8
    group = columns // scale.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    for into, codes, scales in zip(*(t.split(_ROWS) for t in (out, packed, scale)), strict=True):
        values = unpack_int4(codes).float().unflatten(-1, (-1, group)) * scales.float()[..., None]
        into.copy_(values.flatten(-2))
    return out


def quantize_int4(
    weight: torch.Tensor, group_size: int = 128, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix to packed INT4, each group with the scale of the least squared error among a few.

    Args:
        weight: ``[rows, columns]``, floating point; ``group_size`` divides the columns.
        group_size: consecutive columns with one scale: 32, 64 or 128.
        scale_dtype: of the scales; codes are chosen for the scales as they are stored.

    Returns:
        int32 ``[rows, columns / 8]`` and scales ``[rows, columns / group_size]``.

    Raises:
        ValueError: a group size that is not allowed or does not divide, NaN or infinity.
    """
    check_groups(weight.shape[1], group_size)
    packed = torch.empty(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32, device=weight.device)
    scale = torch.empty(weight.shape[0], weight.shape[1] // group_size, dtype=scale_dtype, device=weight.device)
    for into, scales, rows in zip(*(t.split(_ROWS) for t in (packed, scale, weight)), strict=True):
        codes, best = _quantize_rows(rows.float().unflatten(-1, (-1, group_size)), scale_dtype)
        into.copy_(pack_int4(codes.flatten(-2)))
        scales.copy_(best)
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("the weight holds NaN or infinity, which INT4 cannot represent")
    return packed, scale


def check_groups(columns: int, group_size: int) -> None:
    """``ValueError`` where rows of ``columns`` cannot be cut into groups of ``group_size``."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"groups of {group_size} are not supported; supported are {', '.join(map(str, GROUP_SIZES))}")
    if columns % group_size:
        raise ValueError(f"rows of {columns} columns cannot be cut into groups of {group_size}")


def _quantize_rows(groups: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 and scales of ``groups [rows, groups, size]``, float32."""
    most = groups.abs().amax(dim=-1)
    best = error = None
    for shrink in _SHRINK:
        # 7.5: the range has one step more below zero than above, and half a step more is rounded to its ends.
        scale = (most * (shrink / 7.5)).to(scale_dtype).float().clamp_min(torch.finfo(scale_dtype).tiny)
        off = _codes(groups, scale).mul_(scale[..., None]).sub_(groups).square_().sum(dim=-1)
        if best is None or error is None:
            best, error = scale, off
        else:
            best, error = torch.where(off < error, scale, best), torch.minimum(off, error)
    assert best is not None
    return _codes(groups, best).to(torch.int8), best


def _codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (groups / scale[..., None]).round_().clamp_(-8, 7)
