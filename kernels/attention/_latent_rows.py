"""Loads of latent rows within a kernel, from a pool as :meth:`.formats.cache_format.LatentFormat.rows` shows it.

Plain rows are loaded as they are. FP8 rows take two steps, to words and from words to numbers, so that a loop can load
the words of a later step while it works with the numbers of this one. They are words because registers hold 32 bits:
bytes that a loop carries would take four times as many.

No row is masked: a predicate for each of a thread's copies took a fifth of the attention's instructions. So all must be
written rows, also those that :func:`._online_softmax.attend` leaves out: 0 · NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_columns(BLOCK: tl.constexpr, FP8: tl.constexpr):
    """The column of a row at each index of a tile of values ``[rows, BLOCK]``. A thread has 16 neighbouring values of
    an FP8 row, 32 bytes as numbers: all first halves come before all second halves, so that threads that write to
    shared memory at the same time write 16 bytes beside each other. In order they would meet in half of its banks."""
    index = tl.arange(0, BLOCK)
    if FP8:
        columns = index % (BLOCK // 2) // 8 * 16 + index // (BLOCK // 2) * 8 + index % 8
        return tl.max_contiguous(tl.multiple_of(columns, 8), 8)
    else:
        return index


@triton.jit
def load_tile(first, columns, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """``[rows, BLOCK]``: columns ``columns [BLOCK]`` from the pointers ``first [rows, 1]``, zero from COLUMNS on."""
    columns = columns[None, :]
    if COLUMNS == BLOCK:
        return tl.load(first + columns)
    else:
        return tl.load(first + columns, mask=columns < COLUMNS, other=0)


@triton.jit
def load_plain_rows(
    pool, row, STRIDE: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
):  # fmt: skip
    """Rows ``row [rows]``, of 32 bits: ``[rows, BLOCK_VALUE]`` and ``[rows, BLOCK_ROTATED]`` in the pool's dtype."""
    first = pool + row[:, None].to(tl.int64) * STRIDE
    tile = load_tile(first, tl.arange(0, BLOCK_VALUE), VALUE, BLOCK_VALUE)
    return tile, load_tile(first + VALUE, tl.arange(0, BLOCK_ROTATED), ROTATED, BLOCK_ROTATED)


@triton.jit
def load_fp8_rows(
    pool, row, STRIDE: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
):  # fmt: skip
    """Rows ``row [rows]`` (32 bits) of a pool of words: int32 words of four values ``[rows, BLOCK_VALUE / 128, 32]``,
    their float32 scales ``[rows, BLOCK_VALUE / 128]``, and words of two rotated numbers ``[rows, BLOCK_ROTATED / 2]``.
    STRIDE is in words."""
    # In three dimensions a thread that reads 16 values reads their scale once.
    group = tl.arange(0, BLOCK_VALUE // 128)[None, :]
    first = pool + row[:, None].to(tl.int64) * STRIDE
    values = (first + group * 32)[:, :, None] + tl.arange(0, 32)[None, None, :]
    scales = first + VALUE // 4 + group
    if VALUE == BLOCK_VALUE:
        words = tl.load(values)
        scale = tl.load(scales)
    else:
        words = tl.load(values, mask=(group < VALUE // 128)[:, :, None], other=0)
        scale = tl.load(scales, mask=group < VALUE // 128, other=0)
    column = tl.arange(0, BLOCK_ROTATED // 2)
    pairs = load_tile(first + VALUE // 4 + VALUE // 128, column, ROTATED // 2, BLOCK_ROTATED // 2)
    return words, scale.to(tl.float32, bitcast=True), pairs


@triton.jit
def expand_fp8_rows(words, scale, pairs, dtype: tl.constexpr, E4M3: tl.constexpr):
    """Converts the results of :func:`load_fp8_rows` to those of :func:`load_plain_rows`, in ``dtype``, with the values
    in the order of :func:`value_columns`."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    codes = tl.join(even, odd).reshape(words.shape[0], words.shape[1], 128)
    if E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # As bits of float16, whose exponent has a bit more: a number 2^8 times too small, subnormals included.
        bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    halves = (numbers * scale[:, :, None]).to(dtype).reshape(words.shape[0], words.shape[1] * 8, 2, 8)
    tile = tl.permute(halves, (0, 2, 1, 3)).reshape(words.shape[0], words.shape[1] * 128)
    rotated = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)
    return tile, rotated.to(dtype).reshape(pairs.shape[0], 2 * pairs.shape[1])
