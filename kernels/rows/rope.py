"""Rotary position embedding of ready cosines and sines (Su et al., 2021, arXiv 2104.09864).

    (a, b) -> (a·cos − b·sin, b·cos + a·sin)

where (a, b) are the dimensions (2i, 2i+1) when interleaved, as in MLA, and (i, i + dim/2) when not, as in
DeepSeek-V3.2's indexer. The two are different models, not two layouts of one: a wrong choice passes short tests and
fails long contexts.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Values a program, 64 a thread: 8 loads of 16 bytes in flight for 2-byte types, and the angles of a token are loaded
# once for as many heads as fit.
_TILE, _WARPS = 8192, 4


def apply_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = (t.view(x.shape[0], *(1,) * (x.dim() - 2), half) for t in (cos, sin))
    full = x.float()  # rotated in float32, rounded once
    if interleaved:
        a, b = full[..., 0::2], full[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
    a, b = full[..., :half], full[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@triton.jit
def load_pairs(row, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The pairs (a, b) of rows at the pointers ``row [rows, 1]``: two tiles ``[rows, PADDED]``, zero from HALF on."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.load(row + column, mask=inside & (column < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PADDED, 2)))
    else:
        column = tl.arange(0, PADDED)[None, :]
        a = tl.load(row + column, mask=inside & (column < HALF), other=0.0)
        b = tl.load(row + HALF + column, mask=inside & (column < HALF), other=0.0)
    return a, b


@triton.jit
def store_pairs(row, a, b, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The opposite of :func:`load_pairs`."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * PADDED))
        tl.store(row + column, both, mask=inside & (column < 2 * HALF))
    else:
        column = tl.arange(0, PADDED)[None, :]
        tl.store(row + column, a, mask=inside & (column < HALF))
        tl.store(row + HALF + column, b, mask=inside & (column < HALF))


@triton.jit
def load_angles(
    table, first, tokens, stride, TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Rows ``first …`` of a table of cosines or sines, each for HEADS rows: a tile that goes with ``[TOKENS · HEADS,
    PADDED]``."""
    token = (first + tl.arange(0, TOKENS))[:, None]
    column = tl.arange(0, PADDED)[None, :]
    angles = tl.load(table + token * stride + column, mask=(token < tokens) & (column < HALF), other=0.0)
    if TOKENS > 1 and HEADS > 1:
        repeated = tl.broadcast_to(angles[:, None, :], (TOKENS, HEADS, PADDED))
        angles = tl.reshape(repeated, (TOKENS * HEADS, PADDED))
    return angles


@triton.jit
def turn(a, b, cos, sin):
    """The pairs turned in float32, rounded to the type that they had."""
    x, y = a.to(tl.float32), b.to(tl.float32)
    return (x * cos - y * sin).to(a.dtype), (y * cos + x * sin).to(b.dtype)


@kernel(do_not_specialize=["tokens"])
def rope_kernel(
    x, out, cos, sin, tokens, heads,
    x_token, x_head, out_token, out_head, cos_stride, sin_stride,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of TOKENS tokens a program; both are powers of two."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    token = first + row // HEADS
    head = tl.program_id(1).to(tl.int64) * HEADS + row % HEADS
    inside = (token < tokens) & (head < heads)
    c = load_angles(cos, first, tokens, cos_stride, TOKENS, HEADS, HALF, PADDED)
    s = load_angles(sin, first, tokens, sin_stride, TOKENS, HEADS, HALF, PADDED)
    a, b = load_pairs(x + token * x_token + head * x_head, inside, HALF, PADDED, INTERLEAVED)
    a, b = turn(a, b, c, s)
    store_pairs(out + token * out_token + head * out_head, a, b, inside, HALF, PADDED, INTERLEAVED)


def check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> None:
    """Raises ``ValueError`` or ``TypeError`` unless these are float32 ``[tokens, dim / 2]`` with contiguous rows."""
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != tokens or cos.shape[1] < 1:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be [{tokens}, dim / 2], a row for each token"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"cos and sin must be float32, not {cos.dtype} and {sin.dtype}")
    if cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError(
            f"the rows of cos and sin must be contiguous; their strides are {cos.stride()}, {sin.stride()}"
        )


def rotate_first_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """RoPE on the first ``2 · cos.shape[-1]`` dimensions of ``x [T, ..., dim]``."""
    rotated = 2 * cos.shape[-1]
    return torch.cat((apply_rope_reference(x[..., :rotated], cos, sin, interleaved), x[..., rotated:]), dim=-1)


@triton.jit
def load_rest(row, keep, HALF: tl.constexpr, DIM: tl.constexpr, REST_PADDED: tl.constexpr):
    """The numbers after the pairs of rows of DIM numbers, and the mask of those that exist."""
    column = tl.arange(0, REST_PADDED)[None, :]
    inside = keep & (column < DIM - 2 * HALF)
    return tl.load(row + 2 * HALF + column, mask=inside, other=0.0), inside


def row_parts(dim: int, rotated: int, least: int) -> dict[str, int]:
    """The constexprs of a row of ``dim`` numbers, ``rotated`` of them in pairs, with tiles of ``least`` columns or
    more."""
    rest = dim - rotated
    return {
        "DIM": dim,
        "HALF": rotated // 2,
        "PADDED": max(least, next_power_of_2(rotated // 2)),
        "REST_PADDED": max(least, next_power_of_2(rest)) if rest else 0,
    }


@operation(writes=("out",), runs=cpu.runs_kernel)
def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotates ``x [T, ..., dim]`` by ``cos, sin [T, dim / 2]``, float32.

    Args:
        x: any strides, but the last dimension contiguous: ``q[..., nope:]`` needs no copy.
        interleaved: the dimensions that make a pair; see the top of this file.
        out: tensor for the result, shaped like ``x``, with any strides: ``x`` itself, or one that does not overlap it.
            Default: a new tensor.

    Returns:
        ``out``, or a new contiguous tensor of the shape and dtype of ``x``.
    """
    if x.dim() < 2 or x.shape[-1] != 2 * cos.shape[-1] or x.shape[0] != cos.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} does not fit cos {tuple(cos.shape)}")
    check_angles(cos, sin, x.shape[0])
    if out is not None and out.shape != x.shape:
        raise ValueError(f"out {tuple(out.shape)} must have the shape of x {tuple(x.shape)}")
    for name, tensor in (("x", x), ("out", x if out is None else out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous; its strides are {tensor.stride()}")
    native = cpu.serves(x, x if out is None else out) and cpu.serves(cos, sin)
    if not native and not runs_triton(x):
        turned = apply_rope_reference(x, cos, sin, interleaved)
        return turned if out is None else out.copy_(turned)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    target = result.view(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    source = x.reshape(target.shape)  # a copy where no view of x has these dimensions
    tokens, heads, dim = source.shape
    if native:
        cpu.kernels().dsa_rope(
            source.data_ptr(), target.data_ptr(), cos.data_ptr(), sin.data_ptr(), cpu.TYPES[x.dtype], tokens, heads,
            dim // 2, source.stride(0), source.stride(1), target.stride(0), target.stride(1), cos.stride(0),
            sin.stride(0), interleaved, cpu.row_threads(x.numel()),
        )  # fmt: skip
    elif source.numel():
        padded = next_power_of_2(dim // 2)
        at_once = max(1, _TILE // (2 * padded))
        heads_at_once = min(next_power_of_2(heads), at_once)
        tokens_at_once = at_once // heads_at_once
        rope_kernel[(cdiv(tokens, tokens_at_once), cdiv(heads, heads_at_once))](
            source, target, cos, sin, tokens, heads,
            source.stride(0), source.stride(1), target.stride(0), target.stride(1), cos.stride(0), sin.stride(0),
            TOKENS=tokens_at_once, HEADS=heads_at_once, HALF=dim // 2, PADDED=padded, INTERLEAVED=interleaved,
            num_warps=_WARPS,
        )  # fmt: skip
    return result
