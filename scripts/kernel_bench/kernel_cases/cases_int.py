"""Weights in INT8 and INT4: linear layers and experts of DeepSeek-V3.2, beside the run's dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dsa_engine.kernels.formats.int8 import quantize_rows_int8, quantize_rows_int8_reference
from dsa_engine.kernels.grouped.grouped_matmul import grouped_matmul_torch, torch_has_it
from dsa_engine.kernels.grouped.grouped_matmul_int4 import grouped_matmul_int4_reference, grouped_matmul_int4_triton
from dsa_engine.kernels.grouped.grouped_matmul_int8 import (
    grouped_matmul_int8_reference,
    grouped_matmul_int8_triton,
    matmul_int8_reference,
)
from dsa_engine.kernels.linear.linear_int8 import linear_int8
from dsa_engine.kernels.rows.silu_mul import silu_mul, silu_mul_reference
from dsa_engine.kernels.runtime.launch import runs_triton
from kernel_cases.bench import KernelCase
from kernel_cases.cases_moe import CHOICES, HIDDEN, INTERMEDIATE
from kernel_cases.inputs import Inputs, Sizes

O_PROJ = 16_384  # columns of o_proj
GROUP = 128
REFUSED_BY_INT_MM = 16  # maximum number of rows that CUDA's int_mm refuses


def int8(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        yield _quantise(make, tokens, HIDDEN)
        yield _linear(make, tokens)
        yield _one_product(make, tokens)
    yield _quantise(make, sizes.tokens, 18_432)
    for groups, rows in sizes.experts:
        yield _gate_up(make, groups, rows, bits=8)
        yield _down(make, groups, rows, bits=8)


def int4(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for groups, rows in sizes.experts:
        for int8_activations in (False, True):
            yield _gate_up(make, groups, rows, bits=4, int8_activations=int8_activations)
            yield _down(make, groups, rows, bits=4, int8_activations=int8_activations)


def _quantise(make: Inputs, tokens: int, width: int) -> KernelCase:
    x = make.normal(tokens, width)
    return KernelCase(
        "quantise rows to INT8",
        shape=f"{tokens} x {width}",
        run=lambda: quantize_rows_int8(x),
        flops=0.0,
        bytes=float(x.nbytes + x.numel()),
        baselines={"torch": lambda: quantize_rows_int8_reference(x)},
    )


def _linear(make: Inputs, tokens: int) -> KernelCase:
    """o_proj, the largest layer; on a GPU many rows use PyTorch's product, few rows use ours."""
    x, weight, scale = make.normal(tokens, O_PROJ), make.codes(HIDDEN, O_PROJ), make.scales(HIDDEN)
    plain = make.normal(HIDDEN, O_PROJ)
    return KernelCase(
        "linear layer in INT8, with its quantisation",
        shape=f"{tokens} x {O_PROJ} to {HIDDEN}",
        run=lambda: linear_int8(x, weight, scale),
        flops=2.0 * tokens * O_PROJ * HIDDEN,
        bytes=float(x.nbytes + weight.nbytes + tokens * HIDDEN * x.element_size()),
        baselines={"torch linear, not quantised": lambda: F.linear(x, plain)},
        product=tokens > 64,
    )


def _one_product(make: Inputs, tokens: int) -> KernelCase:
    """Our kernel on o_proj, also at sizes at which a layer uses PyTorch's; the latter is timed without scales."""
    x, x_scale = make.codes(tokens, O_PROJ), make.scales(tokens)
    weight, scale = make.codes(HIDDEN, O_PROJ), make.scales(HIDDEN)
    row_ends = torch.full((1,), tokens, device=make.device, dtype=torch.int32)

    def ours() -> torch.Tensor:
        if runs_triton(x):
            return grouped_matmul_int8_triton(x, x_scale, weight[None], scale[None], row_ends, make.dtype)
        return grouped_matmul_int8_reference(x, x_scale, weight[None], scale[None], row_ends, make.dtype)

    theirs = {
        "torch _int_mm, scaled": lambda: matmul_int8_reference(x, x_scale, weight, scale, make.dtype),
        "torch _int_mm alone": lambda: torch._int_mm(x, weight.t()),
    }
    return KernelCase(
        "INT8 product, operands quantised before",
        shape=f"{tokens} x {O_PROJ} to {HIDDEN}",
        run=ours,
        flops=2.0 * tokens * O_PROJ * HIDDEN,
        bytes=float(x.nbytes + weight.nbytes + tokens * HIDDEN * make.dtype.itemsize),
        baselines=theirs if tokens > REFUSED_BY_INT_MM or not x.is_cuda else {},
        product=tokens > 64,
    )


def _product(
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    row_ends: torch.Tensor,
    bits: int,
    int8_activations: bool,
    source: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    codes = quantize_rows_int8(x) if int8_activations else (x, None)
    if runs_triton(x):
        kernel: Any = grouped_matmul_int8_triton if bits == 8 else grouped_matmul_int4_triton
        return kernel(*codes, *weight, row_ends, x.dtype, source=source, gated=gated)
    rows = [t if source is None or t is None else t.index_select(0, source) for t in codes]
    counts = row_ends.diff(prepend=row_ends.new_zeros(1))
    reference: Any = grouped_matmul_int8_reference if bits == 8 else grouped_matmul_int4_reference
    out = reference(rows[0], rows[1], *weight, counts, x.dtype)
    return silu_mul_reference(out) if gated else out


def _weight(make: Inputs, groups: int, out: int, inner: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    if bits == 8:
        return make.codes(groups, out, inner), make.scales(groups, out)
    packed = make.codes(groups, out, inner // 2).view(torch.int32)
    return packed, make.scales(groups, out, inner // GROUP).bfloat16()


def _name(bits: int, int8_activations: bool) -> str:
    return "INT8" if bits == 8 else "INT4, W4A8" if int8_activations else "INT4, W4A16"


def _row_ends(make: Inputs, groups: int, rows: int) -> torch.Tensor:
    return (torch.arange(1, groups + 1, device=make.device) * (rows // groups)).int()


def _gate_up(make: Inputs, groups: int, rows: int, *, bits: int, int8_activations: bool = True) -> KernelCase:
    tokens = max(1, rows // CHOICES)
    x, row_ends = make.normal(tokens, HIDDEN), _row_ends(make, groups, rows)
    weight = _weight(make, groups, 2 * INTERMEDIATE, HIDDEN, bits)
    plain = make.normal(groups, 2 * INTERMEDIATE, HIDDEN)
    source = torch.randint(tokens, (rows,), device=make.device, dtype=torch.int32)

    def separately() -> torch.Tensor:
        return silu_mul(grouped_matmul_torch(x.index_select(0, source), plain, row_ends))

    return KernelCase(
        f"experts in {_name(bits, int8_activations)}: gather, gate and up, SwiGLU",
        shape=f"{rows:,} rows, {groups} experts",
        run=lambda: _product(x, weight, row_ends, bits, int8_activations, source, gated=True),
        flops=4.0 * rows * INTERMEDIATE * HIDDEN,
        bytes=float(x.nbytes + sum(t.nbytes for t in weight) + rows * INTERMEDIATE * x.element_size()),
        baselines={"torch grouped_mm, not quantised": separately} if torch_has_it(x, plain) else {},
        product=rows > 64 * groups,
    )


def _down(make: Inputs, groups: int, rows: int, *, bits: int, int8_activations: bool = True) -> KernelCase:
    x, row_ends = make.normal(rows, INTERMEDIATE), _row_ends(make, groups, rows)
    weight, plain = _weight(make, groups, HIDDEN, INTERMEDIATE, bits), make.normal(groups, HIDDEN, INTERMEDIATE)
    theirs = {"torch grouped_mm, not quantised": lambda: grouped_matmul_torch(x, plain, row_ends)}
    return KernelCase(
        f"experts in {_name(bits, int8_activations)}: down",
        shape=f"{rows:,} rows, {groups} experts",
        run=lambda: _product(x, weight, row_ends, bits, int8_activations),
        flops=2.0 * rows * INTERMEDIATE * HIDDEN,
        bytes=float(x.nbytes + sum(t.nbytes for t in weight) + rows * HIDDEN * x.element_size()),
        baselines=theirs if torch_has_it(x, plain) else {},
        product=rows > 64 * groups,
    )
