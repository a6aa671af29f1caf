"""The Walsh-Hadamard transform: it spreads a large value over all dimensions before they are quantised together.

    y[j] = scale · Σ_i (−1)^popcount(i & j) x[i]        i, j < n, a power of two

With ``scale = n^-0.5`` it is orthogonal: products of two transformed vectors are those of the vectors themselves, so
that the lightning indexer's scores do not change (DeepSeek-V3.2-Exp).

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.launch import chip_of, config_for

LARGEST = 128  # a program holds all signs of the transform, in float32 too

# Rows of a tile by compute capability.
# 64 are a warpgroup's product, and too many registers where there is none. The product with a matrix of signs is exact,
# each product being ±x, and moves no value between threads, as butterflies would.
ROWS = {80: 32, 90: 64, 120: 32}
_ROWS_FLOAT32 = 32

# Three tf32 products keep a float32's bits, since signs are exact in tf32; other types do not heed it. True float32
# products would not fit into the registers.
PRECISION = tl.constexpr("tf32x3")


def hadamard_reference(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Transforms ``x [..., n]``, summed in float32; the result has the dtype of ``x``."""
    size = x.shape[-1]
    full = x.float()
    step = 1
    while step < size:
        a, b = full.unflatten(-1, (-1, 2, step)).unbind(-2)
        full = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return (full * scale).to(x.dtype)


@triton.jit
def signs(i, j, dtype: tl.constexpr):
    """``(−1)^popcount(i & j)`` of numbers below 256."""
    common = i & j
    common ^= common >> 4
    odd = ((0x6996 >> (common & 15)) & 1) == 1  # bit k of 0x6996: the parity of k
    return tl.where(odd, tl.full((1, 1), -1.0, dtype), tl.full((1, 1), 1.0, dtype))


@triton.jit
def sign_rows(first, step, ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Rows ``first, first + step, …`` of the transform's matrix: ``[ROWS, COLUMNS]``."""
    row = first + step * tl.arange(0, ROWS)
    return signs(row[:, None], tl.arange(0, COLUMNS)[None, :], dtype)


@triton.jit
def hadamard_of_parts(
    a, b, rest, HALF: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The transform ``[rows, DIM]``, scaled by DIM^-0.5, of rows held as the pairs (a, b) and the rest after them:
    each part meets the rows of the matrix that belong to its dimensions."""
    if INTERLEAVED:
        summed = tl.dot(a, sign_rows(0, 2, PADDED, DIM, a.dtype), input_precision=PRECISION)
        summed = tl.dot(b, sign_rows(1, 2, PADDED, DIM, a.dtype), summed, input_precision=PRECISION)
    else:
        summed = tl.dot(a, sign_rows(0, 1, PADDED, DIM, a.dtype), input_precision=PRECISION)
        summed = tl.dot(b, sign_rows(HALF, 1, PADDED, DIM, a.dtype), summed, input_precision=PRECISION)
    if REST_PADDED > 0:
        summed = tl.dot(rest, sign_rows(2 * HALF, 1, REST_PADDED, DIM, a.dtype), summed, input_precision=PRECISION)
    return summed * (DIM**-0.5)


def rows_for(x: torch.Tensor) -> int:
    """Rows of a tile of a product with the signs, for rows of the dtype and device of ``x``."""
    return config_for(ROWS, chip_of(x)) if x.element_size() == 2 else _ROWS_FLOAT32


def check_size(size: int) -> None:
    """Raises ``ValueError`` unless vectors of this size can be transformed."""
    if not 1 <= size <= LARGEST or size & (size - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, at most {LARGEST}, not {size}")
