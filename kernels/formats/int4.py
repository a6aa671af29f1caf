"""INT4 in groups along a row, packed as ``compressed-tensors`` stores it (``pack-quantized``).

    code                  −8 … 7
    w[i, j]             = scale[i, j // group] · code[i, j]
    packed[i, j // 8]   has  code[i, j] + 8  in its bits  4 · (j mod 8) …,   int32 [rows, columns / 8]

so that even columns are the low halves and odd columns the high ones.

In memory every 32 columns (16 bytes) are arranged in planes of consecutive columns, 4 of 8 for products of 16 bits
(W4A16) and 2 of 16 for products of 8 bits (W4A8). With n planes, column ``32/n · p + u`` of the 32 is nibble ``p`` of
unit ``u``, a unit being n nibbles, as wide as an operand of the product:

    n = 4    unit u, 16 bits:  columns  u, 8 + u, 16 + u, 24 + u     from the lowest bits up
    n = 2    unit u,  8 bits:  columns  u, 16 + u

A tensor core takes consecutive columns side by side, in words of 32 bits. Such a word is one plane of two or four
units: one to three instructions make it (:func:`unpack_numbers`, :func:`unpack_codes`), where the stored order takes
some for each byte. Results do not depend on the order.

GPTQ may put the columns of a group anywhere in a row (``actorder: "group"``): the file then has ``g_idx[j]``, the group
of column j. In memory the columns of a group lie side by side (:func:`columns_by_group`), and products read x in that
order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.launch import INTERPRETED

GROUP_SIZES = (32, 64, 128)

STORED = 1  # "planes" of the stored order

# Columns that are arranged together, and words that are arranged at a time.
_ARRANGED = 32
_ARRANGED_WORDS = 1 << 21

# Rows that are unpacked or quantised at a time.
_ROWS = 256

# A group's scale is the best of these times the one that just reaches its largest value: cutting that off a little
# often costs less than coarser steps for all others.
_SHRINK = tuple(1 - i / 32 for i in range(13))


def planes_for(int8_activations: bool) -> int:
    """Number of planes in which the weights of a product lie in memory."""
    return 2 if int8_activations else 4


def pack_int4(codes: torch.Tensor, planes: int = STORED) -> torch.Tensor:
    """int8 ``[..., columns]`` within −8 … 7 to int32 ``[..., columns / 8]``; columns in eights, in planes in 32s."""
    if codes.shape[-1] % 8:
        raise ValueError(f"rows of {codes.shape[-1]} columns cannot be packed in eights")
    nibbles = (codes + 8).view(torch.uint8)
    if planes != STORED:
        nibbles = nibbles.unflatten(-1, (-1, planes, _ARRANGED // planes)).transpose(-1, -2).flatten(-3)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).contiguous().view(torch.int32)


def unpack_int4(packed: torch.Tensor, planes: int = STORED) -> torch.Tensor:
    """int32 ``[..., columns / 8]`` to int8 ``[..., columns]``."""
    halves = packed.contiguous().view(torch.uint8)
    if planes == STORED:
        nibbles = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2)
    else:
        units = halves.unflatten(-1, (-1, _ARRANGED // planes, planes // 2)).unbind(-1)
        nibbles = torch.stack([n for half in units for n in (half & 15, half >> 4)], dim=-2).flatten(-3)
    return nibbles.view(torch.int8) - 8


def arrange_int4_(packed: torch.Tensor, planes: int, columns: torch.Tensor | None = None) -> None:
    """Rearranges the stored order into planes within the tensor, some rows at a time: int32 ``[..., columns / 8]``,
    contiguous, columns in 32s. With ``columns [in]`` these stored columns follow one another."""
    if packed.is_meta:  # sizes of a model alone would take many thousand steps
        return
    rows = packed.view(-1, packed.shape[-1])
    for part in rows.split(max(1, _ARRANGED_WORDS // max(1, rows.shape[1]))):
        codes = unpack_int4(part)
        part.copy_(pack_int4(codes if columns is None else codes.index_select(-1, columns), planes))


def columns_by_group(g_idx: torch.Tensor, group_size: int) -> torch.Tensor:
    """The order of a row's columns in which those of a group lie side by side.

    Args:
        g_idx: int32 ``[in]``, the group of each column. With a −1 in it the columns are in order, as
            ``compressed-tensors`` understands it.
        group_size: number of columns of each group.

    Returns:
        int32 ``[in]``: the columns of the first group, of the second, …, each in ascending order.

    Raises:
        ValueError: a group that does not exist, or that has fewer or more columns than ``group_size``.
    """
    if g_idx.is_meta or bool((g_idx == -1).any()):
        return torch.arange(g_idx.shape[0], dtype=torch.int32, device=g_idx.device)
    order = g_idx.argsort(stable=True)
    groups = torch.arange(g_idx.shape[0], dtype=torch.int32, device=g_idx.device) // group_size
    wrong = (g_idx[order] != groups).nonzero()
    if wrong.numel():
        column = int(order[int(wrong[0])])
        raise ValueError(
            f"column {column} is in group {int(g_idx[column])}: each of the groups 0 … {int(groups[-1])} must have "
            f"{group_size} columns"
        )
    return order.int()


def dequantize_int4(
    packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, planes: int = STORED
) -> torch.Tensor:
    """Expands a packed matrix, some rows at a time.

    Args:
        packed: int32 ``[rows, columns / 8]``.
        scale: ``[rows, columns / group]``, floating point.
        dtype: dtype of the result; each product is made in float32 and rounded once.
        planes: number of planes in which the columns lie.

    Returns:
        ``[rows, columns]``.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 8
    group = columns // scale.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    for into, codes, scales in zip(*(t.split(_ROWS) for t in (out, packed, scale)), strict=True):
        values = unpack_int4(codes, planes).float().unflatten(-1, (-1, group)) * scales.float()[..., None]
        into.copy_(values.flatten(-2))
    return out


def quantize_int4(
    weight: torch.Tensor, group_size: int = 128, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix to packed INT4, each group with the scale of the least squared error among a few.

    Args:
        weight: ``[rows, columns]``, floating point; ``group_size`` divides the columns.
        group_size: consecutive columns with one scale: 32, 64 or 128.
        scale_dtype: dtype of the scales; codes are chosen for the scales as they are stored.

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
    maximum = groups.abs().amax(dim=-1)
    best = error = None
    for shrink in _SHRINK:
        # 7.5: the range has one step more below zero than above, and half a step more is rounded into it.
        scale = (maximum * (shrink / 7.5)).to(scale_dtype).float().clamp_min(torch.finfo(scale_dtype).tiny)
        off = _codes(groups, scale).mul_(scale[..., None]).sub_(groups).square_().sum(dim=-1)
        if best is None or error is None:
            best, error = scale, off
        else:
            best, error = torch.where(off < error, scale, best), torch.minimum(off, error)
    assert best is not None
    return _codes(groups, best).to(torch.int8), best


def _codes(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (groups / scale[..., None]).round_().clamp_(-8, 7)


# From a word with n nibbles for each operand to the n words of operands, for Triton's inline assembly. The constants
# 0x4300 and 0x6400 are 128 in bfloat16 and 1024 in float16, where one is the last bit of the mantissa: 4 bits put there
# add to them exactly. LUT 0xEA is (a & b) | c, and 0x6A (a & b) ^ c.
_TO_INT8 = tl.constexpr(
    """{
    .reg .b32 low;
    shl.b32 low, $2, 4;
    lop3.b32 $0, low, 0xF0F0F0F0, 0x80808080, 0x6A;
    lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
    }"""
)
_ABOVE = """{
    .reg .b32 two, three, four;
    shr.b32 two, $4, 4;
    shr.b32 three, $4, 8;
    shr.b32 four, $4, 12;
    lop3.b32 $0, $4, 0x000F000F, ABOVE, 0xEA;
    lop3.b32 $1, two, 0x000F000F, ABOVE, 0xEA;
    lop3.b32 $2, three, 0x000F000F, ABOVE, 0xEA;
    lop3.b32 $3, four, 0x000F000F, ABOVE, 0xEA;
    }"""
_ABOVE_128 = tl.constexpr(_ABOVE.replace("ABOVE", "0x43004300"))
_ABOVE_1024 = tl.constexpr(_ABOVE.replace("ABOVE", "0x64006400"))

# The interpreter knows no inline assembly: it, and float32, take a nibble at a time, to the same values.
_BY_WORD = tl.constexpr(not INTERPRETED)


@triton.jit
def unpack_codes(units, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Two planes, uint8 ``[ROWS, SIZE / 2]``, to 16 · code, int8 ``[ROWS, SIZE]``: no shift back to the right."""
    if _BY_WORD:
        first, second = tl.inline_asm_elementwise(
            _TO_INT8, "=&r,=r,r", [units], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        first, second = (
            ((units << 4) ^ 0x80).to(tl.int8, bitcast=True),
            ((units & 0xF0) ^ 0x80).to(tl.int8, bitcast=True),
        )
    planes = tl.join(tl.reshape(first, (ROWS, SIZE // 32, 16)), tl.reshape(second, (ROWS, SIZE // 32, 16)))
    return tl.reshape(tl.permute(planes, (0, 1, 3, 2)), (ROWS, SIZE))


@triton.jit
def unpack_numbers(units, dtype: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Four planes, int16 ``[ROWS, SIZE / 4]``, to codes ``[ROWS, SIZE]`` in dtype, a floating-point type, exactly."""
    if _BY_WORD and dtype != tl.float32:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _ABOVE_128 if dtype == tl.bfloat16 else _ABOVE_1024, "=&r,=&r,=&r,=r,r", [units],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        above: tl.constexpr = 136 if dtype == tl.bfloat16 else 1032
        first, second = first.to(dtype, bitcast=True) - above, second.to(dtype, bitcast=True) - above
        third, fourth = third.to(dtype, bitcast=True) - above, fourth.to(dtype, bitcast=True) - above
    else:
        first, second = ((units & 15) - 8).to(dtype), ((units >> 4 & 15) - 8).to(dtype)
        third, fourth = ((units >> 8 & 15) - 8).to(dtype), ((units >> 12 & 15) - 8).to(dtype)
    first, second = tl.reshape(first, (ROWS, SIZE // 32, 8)), tl.reshape(second, (ROWS, SIZE // 32, 8))
    third, fourth = tl.reshape(third, (ROWS, SIZE // 32, 8)), tl.reshape(fourth, (ROWS, SIZE // 32, 8))
    planes = tl.join(tl.join(first, third), tl.join(second, fourth))  # [..., unit, high bit of plane, low bit]
    return tl.reshape(tl.permute(planes, (0, 1, 3, 4, 2)), (ROWS, SIZE))
