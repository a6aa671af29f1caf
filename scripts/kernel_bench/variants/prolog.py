"""The prolog of a decode layer in one launch: residual, RMSNorm, FP8 codes, and the product [q_a; wk; kv_a].

Each program norms all rows, quantises the part that it multiplies, into memory that no other reads, and meanwhile asks
for its part of the weight in L2. With 1,024 numbers and 128 columns a program (126 of them) a warp runs 1,810
instructions with 26 barriers for 1 row, 2,500 with 38 for 4, and the last one of a tile 270 more; with whole rows and
16 columns (140 programs) 8,260 with 132, and 10,780 with 202: so the inner dimension is divided.

Expected, not measured: 3 to 4 us less than the norm and then the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import quantize_tile
from dsa_engine.kernels.formats.quantize import codes_and_scales
from dsa_engine.kernels.linear.block_scaled_matmul import (
    block_scaled_linear,
    block_scaled_matmul_kernel,
    block_scaled_matmul_triton,
    no_program_finished,
)
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import INTERPRETED, chip_of, runs_triton
from kernel_cases.inputs import HIDDEN, Inputs, KernelCase, Sizes

COLUMNS = 1536 + 128 + 576
COMPILED = tl.constexpr(not INTERPRETED)


@kernel
def prolog_kernel(
    x, residual, norm_weight, weight, weight_scale, normed, summed, codes, scales, out, parts, finished, rows, width,
    EPS: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of 128 columns, parts of PART numbers of a row)``. ``codes [tiles, ROWS, INNER]`` and ``scales
    [tiles, ROWS, INNER / 128]``: memory, of which each program writes and reads another part."""
    tile, begin = tl.program_id(0), tl.program_id(1) * PART
    row, block, part = tl.arange(0, ROWS)[:, None], tl.arange(0, PART // 128)[None, :], tl.arange(0, PART)[None, :]
    if COMPILED:
        column = tl.minimum(tile * 128 + tl.arange(0, 128), width - 1).to(tl.int64)
        lines = weight + column[:, None] * INNER + begin + block * 128
        fetch: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(fetch, "=r,l", [lines], tl.int32, is_pure=False, pack=1)
    squares = tl.zeros((ROWS, PART), tl.float32)
    for first in tl.static_range(0, INNER, PART):
        at = row * INNER + first + part
        value = tl.load(x + at, mask=row < rows, other=0.0) + tl.load(residual + at, mask=row < rows, other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / INNER + EPS)
    at = row * INNER + begin + part
    value = tl.load(x + at, mask=row < rows, other=0.0) + tl.load(residual + at, mask=row < rows, other=0.0)
    result = tl.load(norm_weight + begin + part) * (value.to(tl.float32) * scale).to(value.dtype)
    if tile == 0:
        tl.store(summed + at, value, mask=row < rows)
        tl.store(normed + at, result, mask=row < rows)
    codes, scales = codes + tile * ROWS * INNER, scales + tile * ROWS * (INNER // 128)
    code, of_block = quantize_tile(tl.reshape(result.to(tl.float32), (ROWS * PART // 128, 128)), True, CONVERTS)
    tl.store(codes + at, tl.reshape(code, (ROWS, PART)).to(tl.float8e4nv, bitcast=True))
    tl.store(scales + row * (INNER // 128) + begin // 128 + block, tl.reshape(of_block, (ROWS, PART // 128)))
    tl.debug_barrier()  # they are stored
    block_scaled_matmul_kernel(
        codes, scales, weight, weight_scale, out, parts, finished, rows, width, INNER, INNER, INNER // 128,
        rows * width, 16, 128, True, True, 16, True, CONVERTS,
    )  # fmt: skip


def prolog(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor,
    weight_scale: torch.Tensor, finished: torch.Tensor, part: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The product of at most 16 normed rows, these rows, and the sums that were normed. ``finished``: zeros int32 for
    each tile, also afterwards. ``part`` is a power of two, of which a row has several."""
    if not runs_triton(x):
        return in_two_launches(x, residual, norm_weight, weight, weight_scale, finished)
    (rows, inner), width, padded = x.shape, len(weight), next_power_of_2(len(x))
    tiles, splits = cdiv(width, 128), inner // part
    codes, scales = weight.new_empty(tiles, padded, inner), weight_scale.new_empty(tiles, padded, inner // 128)
    normed, summed, parts = torch.empty_like(x), torch.empty_like(x), weight_scale.new_empty(splits, rows, width)
    out = x.new_empty(rows, width)
    prolog_kernel[(tiles, splits)](
        x, residual, norm_weight, weight, weight_scale, normed, summed, codes, scales, out, parts, finished, rows,
        width, EPS=1e-6, INNER=inner, ROWS=padded, PART=part, CONVERTS=chip_of(x).converts_e4m3,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out, normed, summed


def in_two_launches(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor,
    weight_scale: torch.Tensor, finished: torch.Tensor, words: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same by the engine's kernels. With ``words`` the norm makes the codes, not each program of the product."""
    normed, summed = add_rms_norm(x, residual, norm_weight, 1e-6, None, words, True)
    if words is None:
        return block_scaled_linear(normed, weight, weight_scale, power_of_two=True, finished=finished), normed, summed
    codes = codes_and_scales(words, x.shape[1])
    return block_scaled_matmul_triton(*codes, weight, weight_scale, x.dtype, finished=finished), normed, summed


def variant_prolog(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    weight, scales, norm_weight = make.fp8(COLUMNS, HIDDEN), make.scales(18, HIDDEN // 128), make.normal(HIDDEN)
    for rows in (1, 2, 4):
        x, finished = make.normal(rows, HIDDEN), no_program_finished(weight)
        given = x, make.normal(rows, HIDDEN), norm_weight, weight, scales, finished
        others = {"norm, then product": partial(in_two_launches, *given)}
        if runs_triton(x):
            words = make.zeros(rows, HIDDEN // 4 + HIDDEN // 128, dtype=torch.int32)
            others["norm with codes, then product"] = partial(in_two_launches, *given, words)
        yield KernelCase(
            "norm, codes and product, one launch",
            f"{rows} x {HIDDEN} x {COLUMNS}",
            partial(prolog, *given),
            bytes=weight.nbytes + 4 * x.nbytes,
            baselines=others,
            needs=89,
        )
