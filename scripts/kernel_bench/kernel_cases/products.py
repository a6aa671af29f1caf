"""Experts and linear layers of DeepSeek-V3.2 in every weight format, beside bfloat16 and the products of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dsa_engine.kernels.grouped.grouped_matmul import (
    PLAIN,
    grouped_matmul_torch,
    grouped_matmul_triton,
    takes_torch_grouped_mm,
)
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8, W4A16
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8, grouped_matmul_int8
from dsa_engine.kernels.grouped.products import Groups, ProductFormat
from dsa_engine.kernels.libraries.block_scaled import by_torch, fits
from dsa_engine.kernels.linear.block_scaled_matmul import (
    block_scaled_linear,
    block_scaled_matmul_triton,
    no_program_finished,
)
from dsa_engine.kernels.linear.linear import linear as plain_linear
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import batch_invariance, runs_triton
from kernel_cases.inputs import HIDDEN, Call, Inputs, KernelCase, Sizes

INTERMEDIATE, TOP_K, GROUP, BLOCK = 2048, 8, 128, 128
FP8_PRODUCTS = 89  # the first compute capability with FP8 products
FORMATS = {"bfloat16": PLAIN, "FP8": block_fp8(True, HIDDEN), "INT8": INT8, "W4A8": W4A8, "W4A16": W4A16}
# Output and input width of a linear layer: few columns (with a whole last block, as of many rows) and many, and the
# longest sums.
LAYERS = {"q_a + wk + kv_a": (2304, 7168), "q_b": (24576, 1536), "o": (7168, 16384)}


def _weight(make: Inputs, product: ProductFormat, *shape: int) -> Any:
    """The parts of a weight ``[…, out, in]``."""
    *before, out, inner = shape
    if product is PLAIN:
        return (make.normal(*shape),)
    if product is INT8:
        return make.codes(*shape), make.scales(*before, out)
    if product in (W4A8, W4A16):
        packed = make.codes(*before, out, inner // 2).view(torch.int32)
        return packed, make.scales(*before, out, inner // GROUP).bfloat16(), None
    return make.fp8(*shape), make.scales(*before, cdiv(out, BLOCK), cdiv(inner, BLOCK))


def experts(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """A rank with 4 of 256 experts (64 ranks) in prefill, and with 4 and 32 (8 ranks) in decode."""
    for groups, rows in sizes.experts:
        for name, product in FORMATS.items():
            yield _experts(make, groups, rows, name, product)


def _experts(make: Inputs, groups: int, rows: int, name: str, product: ProductFormat) -> KernelCase:
    x = make.normal(max(1, rows // TOP_K), HIDDEN)
    topk_ids, topk_weights = make.whole(groups, len(x), TOP_K), make.floats(len(x), TOP_K)
    halves = (2, INTERMEDIATE) if name == "FP8" else (2 * INTERMEDIATE,)
    gate_up, down = (_weight(make, product, groups, *one) for one in ((*halves, HIDDEN), (HIDDEN, INTERMEDIATE)))
    baselines: dict[str, Call] = {}
    if product is PLAIN and runs_triton(x):
        baselines = _gate_and_up(make, x, gate_up[0], rows)
    elif product is not PLAIN:
        plain_gate_up = _weight(make, PLAIN, groups, 2 * INTERMEDIATE, HIDDEN)
        plain_down = _weight(make, PLAIN, groups, HIDDEN, INTERMEDIATE)
        plain = partial(expert_mlp, x, topk_ids, topk_weights, plain_gate_up, plain_down)
        baselines["in the run's dtype"] = partial(plain, uncounted_bytes=sys.maxsize)
    return KernelCase(
        f"experts, {name}",
        f"{rows:,} rows, {groups} experts",
        partial(expert_mlp, x, topk_ids, topk_weights, gate_up, down, product, uncounted_bytes=sys.maxsize),
        bytes=2.0 * x.nbytes + sum(part.nbytes for part in (*gate_up, *down) if part is not None),
        flops=6.0 * rows * INTERMEDIATE * HIDDEN,
        baselines=baselines,
        product=rows > 64 * groups,
        needs=FP8_PRODUCTS if name == "FP8" else 0,
    )


def _gate_and_up(make: Inputs, x: torch.Tensor, weight: torch.Tensor, rows: int) -> dict[str, Call]:
    """The first product of plain experts alone, gather and SwiGLU included: ours and PyTorch's, if it can be taken."""
    each = rows // len(weight)
    row_ends = (torch.arange(1, len(weight) + 1, device=make.device) * each).int()
    way = Groups(row_ends, make.whole(len(x), rows), gated=True)
    calls: dict[str, Call] = {"our gate and up": partial(grouped_matmul_triton, x, weight, way)}
    if takes_torch_grouped_mm(x, weight):
        calls["torch grouped_mm"] = partial(grouped_matmul_torch, x, weight, way)
    return calls


def linear(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:3]):
        for name, (out, inner) in LAYERS.items():
            x, plain = make.normal(tokens, inner), make.normal(out, inner)
            for kind in ("FP8", "INT8", "W4A8", "W4A16") if name == "o" else ("FP8",):
                weight = _weight(make, FORMATS[kind], out, inner)
                run = partial(quantized_linear, x, weight, FORMATS[kind])
                if kind == "FP8":
                    finished = no_program_finished(x)
                    run = partial(block_scaled_linear, x, *weight, power_of_two=True, finished=finished)
                yield KernelCase(
                    f"linear layer {name}, {kind}",
                    f"{tokens} x {inner} x {out}",
                    run,
                    bytes=x.nbytes + sum(t.nbytes for t in weight if t is not None) + tokens * out * x.element_size(),
                    flops=2.0 * tokens * out * inner,
                    baselines={"torch in the run's dtype": partial(F.linear, x, plain)}
                    | (_products(make, kind, tokens, weight) if runs_triton(x) else {}),
                    product=tokens > 64,
                    needs=FP8_PRODUCTS if kind == "FP8" else 0,
                )
    for tokens in (sizes.tokens, 1, 4) if make.device.type == "cuda" else ():  # PyTorch's product is CUDA's alone
        for name, out in {"router's gate": 256, "weights_proj": 64}.items():
            x, weight = make.normal(tokens, HIDDEN), make.normal(out, HIDDEN)
            yield KernelCase(
                f"{name}, float32 result",
                f"{tokens} x {HIDDEN} x {out}",
                partial(plain_linear, x, weight, torch.float32),
                bytes=x.nbytes + weight.nbytes + tokens * out * 4,
                flops=2.0 * tokens * out * HIDDEN,
                baselines={"our product": partial(_float32_product, x, weight)},
            )


def _float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with batch_invariance(True):
        return plain_linear(x, weight, torch.float32)


def _products(make: Inputs, kind: str, tokens: int, weight: Any) -> dict[str, Call]:
    """The layer's product of quantised rows without what comes before it: ours, and PyTorch's if it can be taken."""
    (matrix, scale, *_), inner = weight, weight[0].shape[-1]
    if kind == "FP8":
        x, x_scale = make.fp8(tokens, inner), make.scales(tokens, inner // BLOCK)
        ours: Any = partial(block_scaled_matmul_triton, x, x_scale, matrix, scale, make.dtype)
        calls: dict[str, Call] = {"our product": ours}
        if hasattr(F, "scaled_mm") and x.is_cuda and fits(matrix, make.dtype):
            calls["torch scaled_mm"] = partial(by_torch, x, x_scale, matrix, scale)
        return calls
    if kind != "INT8":
        return {}
    groups = Groups(torch.full((1,), tokens, device=make.device, dtype=torch.int32))
    codes, x_scale = make.codes(tokens, inner), make.scales(tokens)
    ours = partial(grouped_matmul_int8, codes, x_scale, matrix[None], scale[None], groups, make.dtype)
    # Without scales; on CUDA it refuses 16 rows or fewer.
    return {"our product": ours, "torch _int_mm": partial(torch._int_mm, codes, matrix.t())}
