"""The lightning indexer's cached key of a token, from the raw output of ``wk`` to its slot in one pass.

    k = LayerNorm(x) · weight + bias            statistics and result in float32, rounded once
    k[:rotated] = RoPE(k[:rotated])             the first dimensions only
    k = Hadamard(k) · dim^-0.5                  in an FP8 pool: rounded once more, then quantised by one scale a key

DeepSeek-V3.2-Exp, section 2.1, rounded in bfloat16 as its released code does; the formats of a pool are in
:mod:`.formats.row_format`.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.rows.paged import as_pool, check_written, page_and_offset, store_native, store_rows_reference
from dsa_engine.kernels.rows.rope import (
    check_angles,
    load_angles,
    load_pairs,
    load_rest,
    rotate_first_reference,
    row_parts,
    store_pairs,
    turn,
)
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

_WARPS = 4


def index_keys_reference(
    projected: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float,
    cos: torch.Tensor, sin: torch.Tensor, interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """``[T, dim]``, as a pool of the dtype of ``projected`` holds them."""
    normed = F.layer_norm(projected.float(), norm_weight.shape, norm_weight, norm_bias, eps).to(projected.dtype)
    return rotate_first_reference(normed, cos, sin, interleaved)


def store_keys_reference(
    pool: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor | None, key_format: IndexKeyFormat
) -> None:
    """Stores ``keys [T, dim]`` as the pool's format encodes them."""
    codes, scales = key_format.encode(keys)
    values, factors = key_format.views(pool)
    store_rows_reference(values.view(pool.dtype), codes.view(pool.dtype), slots)
    if scales is not None and factors is not None:
        store_rows_reference(factors.unsqueeze(-1), scales, slots)


@triton.jit
def layer_norm_parts(
    a, b, rest, weight, bias, eps,
    HALF: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, REST_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """LayerNorm of rows in three parts, whose padding is and stays zero."""
    x, y = a.to(tl.float32), b.to(tl.float32)
    total = tl.sum(x + y, axis=1, keep_dims=True)
    pair = tl.arange(0, PADDED)[None, :] < HALF
    if REST_PADDED > 0:
        z = rest.to(tl.float32)
        column = tl.arange(0, REST_PADDED)[None, :]
        in_rest = column < DIM - 2 * HALF
        total += tl.sum(z, axis=1, keep_dims=True)
    mean = total / DIM
    x, y = tl.where(pair, x - mean, 0.0), tl.where(pair, y - mean, 0.0)
    squares = tl.sum(x * x + y * y, axis=1, keep_dims=True)
    if REST_PADDED > 0:
        z = tl.where(in_rest, z - mean, 0.0)
        squares += tl.sum(z * z, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / DIM + eps)
    always = tl.full((1, 1), 1, tl.int1)
    weight_a, weight_b = load_pairs(weight + tl.zeros((1, 1), tl.int32), always, HALF, PADDED, INTERLEAVED)
    bias_a, bias_b = load_pairs(bias + tl.zeros((1, 1), tl.int32), always, HALF, PADDED, INTERLEAVED)
    a = (x * scale * weight_a + bias_a).to(a.dtype)
    b = (y * scale * weight_b + bias_b).to(b.dtype)
    if REST_PADDED > 0:
        weight_rest = tl.load(weight + 2 * HALF + column, mask=in_rest, other=0.0)
        bias_rest = tl.load(bias + 2 * HALF + column, mask=in_rest, other=0.0)
        rest = (z * scale * weight_rest + bias_rest).to(rest.dtype)
    return a, b, rest


@kernel(do_not_specialize=["count"])
def store_index_keys_kernel(
    x, weight, bias, cos, sin, pool, slots, count, eps, x_stride, cos_stride, sin_stride, page_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr, SCALES_AT: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program. A key lies in three parts, so that its pairs meet without moving between threads.

    Coded: the scales of a page lie after the values of all its keys, from the byte SCALES_AT on."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    page, offset, keep = page_and_offset(slots, row, count, PAGE_SIZE)
    source, target = x + row[:, None] * x_stride, pool + page * page_stride + offset * DIM
    a, b = load_pairs(source, keep, HALF, PADDED, INTERLEAVED)
    rest = a
    if REST_PADDED > 0:
        rest, in_rest = load_rest(source, keep, HALF, DIM, REST_PADDED)
    c = load_angles(cos, first, count, cos_stride, ROWS, 1, HALF, PADDED)
    s = load_angles(sin, first, count, sin_stride, ROWS, 1, HALF, PADDED)
    a, b, rest = layer_norm_parts(a, b, rest, weight, bias, eps, HALF, PADDED, DIM, REST_PADDED, INTERLEAVED)
    a, b = turn(a, b, c, s)
    if FORMAT.coded:
        codes, scales = FORMAT.encode(a, b, rest, HALF, PADDED, DIM, REST_PADDED, INTERLEAVED, POWER_OF_TWO, CONVERTS)
        tl.store(target + tl.arange(0, DIM)[None, :], codes, mask=keep)
        at_scale = (pool + page * page_stride + SCALES_AT + offset * 4).to(tl.pointer_type(tl.float32))
        tl.store(at_scale, scales, mask=keep)
    else:
        element: tl.constexpr = pool.dtype.element_ty
        store_pairs(target, a.to(element), b.to(element), keep, HALF, PADDED, INTERLEAVED)
        if REST_PADDED > 0:
            column = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
            tl.store(target + column, rest.to(element), mask=in_rest)


def _run_native(
    projected: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float, cos: torch.Tensor,
    sin: torch.Tensor, interleaved: bool, pool: torch.Tensor, slots: torch.Tensor | None,
) -> None:  # fmt: skip
    """Runs ``cpu/rows.cpp``."""
    projected = projected if projected.stride(1) == 1 else projected.contiguous()
    norm_weight, norm_bias = norm_weight.contiguous(), norm_bias.contiguous()
    slots = None if slots is None else slots.contiguous()
    outside = cpu.kernels().dsa_store_index_keys(
        projected.data_ptr(), norm_weight.data_ptr(), norm_bias.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        pool.data_ptr(), None if slots is None else slots.data_ptr(), cpu.TYPES[projected.dtype], *projected.shape,
        cos.shape[1],
        projected.stride(0), cos.stride(0), sin.stride(0), slots is not None and slots.dtype == torch.int64,
        pool.shape[0], pool.shape[1], pool.stride(0), interleaved, eps, cpu.row_threads(projected.numel()),
    )  # fmt: skip
    check_written(outside, pool)


def _numbers(given: dict[str, Any], result: None) -> list[torch.Tensor] | None:
    """The keys of a destination with codes as numbers."""
    key_format: IndexKeyFormat = given["key_format"]
    pool = given["out"] if given["slots"] is not None else given["out"].unsqueeze(1)
    return [key_format.unpack(pool)] if key_format.coded else None


@operation(writes=("out",), runs=cpu.runs_kernel, decoded=_numbers, waits=True)
def store_index_keys(
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    key_format: IndexKeyFormat,
    interleaved: bool,
) -> None:
    """Norms, rotates and writes the index keys of T tokens.

    Args:
        projected: ``[T, dim]``, the output of wk; rows with any stride.
        norm_weight, norm_bias: float32 ``[dim]``.
        cos, sin: float32 ``[T, rotated / 2]``.
        out: a pool ``[pages, page_size, width]``, or without slots plain rows ``[T, width]`` with any row stride. The
            width and dtype are ``columns`` and ``pool_dtype`` of ``key_format``; plain FP8 rows are values and scale.
        slots: ``[T]`` int32 or int64; tokens with slot −1 are dropped.
        interleaved: see :mod:`.rope`.

    Raises:
        IndexError: on a CPU, slots outside of the pool.
    """
    tokens, dim = projected.shape
    rotated = 2 * cos.shape[-1]
    if norm_weight.shape != (dim,) or norm_bias.shape != (dim,):
        raise ValueError(f"weight {tuple(norm_weight.shape)} and bias {tuple(norm_bias.shape)} must be [{dim}]")
    if rotated > dim:
        raise ValueError(f"{rotated} rotated columns do not fit keys of {dim}")
    check_angles(cos, sin, tokens)
    if (key_format.dim, key_format.pool_dtype) != (dim, out.dtype):
        raise ValueError(f"keys of {dim} numbers in {out.dtype} do not have the format {key_format}")
    pool = as_pool(out, slots, tokens, key_format.columns, key_format.alignment)

    def store(keys: torch.Tensor) -> None:
        store_keys_reference(pool, keys, slots, key_format)

    if cpu.serves(projected) and cpu.serves(norm_weight, norm_bias, cos, sin, dtype=torch.float32):
        run = partial(_run_native, projected, norm_weight, norm_bias, eps, cos, sin, interleaved)
        store_native(run, store, pool, slots, projected, dim)
    elif not runs_triton(projected):
        store(index_keys_reference(projected, norm_weight, norm_bias, eps, cos, sin, interleaved))
    elif tokens:
        projected = projected if projected.stride(1) == 1 else projected.contiguous()
        rows = key_format.rows_at_once(projected)
        store_index_keys_kernel[(cdiv(tokens, rows),)](
            projected, norm_weight, norm_bias, cos, sin, pool, slots, tokens, eps,
            projected.stride(0), cos.stride(0), sin.stride(0), pool.stride(0),
            **row_parts(dim, rotated, key_format.least_part), PAGE_SIZE=0 if slots is None else pool.shape[1],
            ROWS=rows, INTERLEAVED=interleaved, FORMAT=key_format.helpers,
            SCALES_AT=key_format.scales_at(pool.shape[1]), POWER_OF_TWO=key_format.power_of_two,
            CONVERTS=chip_of(projected).converts_e4m3, num_warps=_WARPS,
        )  # fmt: skip
