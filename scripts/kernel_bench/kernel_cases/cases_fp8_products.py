"""Block-scaled FP8 products of DeepSeek-V3.2: linear layers and experts, beside bfloat16 and the FP8 of other
libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from dsa_engine.kernels.linear.block_scaled_libraries import by_torch, takes
from dsa_engine.kernels.linear.block_scaled_matmul import (
    BLOCK,
    block_scaled_linear,
    block_scaled_matmul_reference,
    block_scaled_matmul_triton,
    no_program_finished,
)
from dsa_engine.kernels.moe.block_scaled_experts import block_scaled_experts
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import runs_triton
from kernel_cases.bench import KernelCase
from kernel_cases.cases_moe import CHOICES, HIDDEN, INTERMEDIATE
from kernel_cases.inputs import Inputs, Sizes

FP8_PRODUCTS = 89  # the first compute capability with FP8 products

# Output and input width of a linear layer: few columns and many, and the longest sums.
LAYERS = {"q_a": (1536, 7168), "q_b": (24576, 1536), "o": (7168, 16384)}


def fp8_products(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:3]):
        for name, shape in LAYERS.items():
            yield _linear(make, tokens, name, *shape)
            yield _product(make, tokens, name, *shape)
    for groups, rows in sizes.experts:
        yield _experts(make, groups, max(1, rows // CHOICES))


def _scales(make: Inputs, *shape: int) -> torch.Tensor:
    """Scales of a weight ``[…, out, in]``."""
    blocks = (*shape[:-2], *(cdiv(size, BLOCK) for size in shape[-2:]))
    return make.normal(*blocks, dtype=torch.float32).abs_()


def _linear(make: Inputs, tokens: int, name: str, out: int, inner: int) -> KernelCase:
    x, weight, scale = make.normal(tokens, inner), make.fp8(out, inner), _scales(make, out, inner)
    plain, finished = make.normal(out, inner), no_program_finished(x)
    return KernelCase(
        f"FP8 linear layer {name}, input quantised",
        shape=f"{tokens} x {inner} x {out}",
        run=lambda: block_scaled_linear(x, weight, scale, power_of_two=True, finished=finished),
        flops=2.0 * tokens * out * inner,
        bytes=float(x.nbytes + weight.nbytes + tokens * out * x.element_size()),
        baselines={"torch in the run's dtype": lambda: F.linear(x, plain)},
        product=tokens > 64,
        needs=FP8_PRODUCTS,
    )


def _product(make: Inputs, tokens: int, name: str, out: int, inner: int) -> KernelCase:
    """Our kernel, also at sizes at which a layer uses PyTorch's."""
    x, x_scale = make.fp8(tokens, inner), make.scales(tokens, inner // BLOCK)
    weight, scale = make.fp8(out, inner), _scales(make, out, inner)

    def ours() -> torch.Tensor:
        if runs_triton(x):
            return block_scaled_matmul_triton(x, x_scale, weight, scale, make.dtype)
        return block_scaled_matmul_reference(x, x_scale, weight, scale).to(make.dtype)

    theirs = {"torch scaled_mm": lambda: by_torch(x, x_scale, weight, scale)}
    return KernelCase(
        f"FP8 product {name}, operands quantised before",
        shape=f"{tokens} x {inner} x {out}",
        run=ours,
        flops=2.0 * tokens * out * inner,
        bytes=float(x.nbytes + weight.nbytes + tokens * out * make.dtype.itemsize),
        baselines=theirs if hasattr(F, "scaled_mm") and takes(x, weight, make.dtype) else {},
        product=tokens > 64,
        needs=FP8_PRODUCTS,
    )


def _experts(make: Inputs, groups: int, tokens: int) -> KernelCase:
    gate_up, down = make.fp8(groups, 2, INTERMEDIATE, HIDDEN), make.fp8(groups, HIDDEN, INTERMEDIATE)
    gate_up_scale, down_scale = _scales(make, *gate_up.shape), _scales(make, *down.shape)
    x, weights = make.normal(tokens, HIDDEN), make.normal(tokens, CHOICES, dtype=torch.float32)
    experts = torch.randint(groups, (tokens, CHOICES), device=make.device, dtype=torch.int32)
    plain = make.normal(groups, 2 * INTERMEDIATE, HIDDEN), make.normal(groups, HIDDEN, INTERMEDIATE)
    rows = tokens * CHOICES
    return KernelCase(
        "FP8 experts, input quantised",
        shape=f"{rows:,} rows, {groups} experts",
        run=lambda: block_scaled_experts(
            x, experts, weights, gate_up, gate_up_scale, down, down_scale, power_of_two=True,
            uncounted_bytes=sys.maxsize,
        ),
        flops=6.0 * rows * INTERMEDIATE * HIDDEN,
        bytes=float(2 * x.nbytes + gate_up.nbytes + down.nbytes),
        baselines={
            "ours in the run's dtype": lambda: expert_mlp(x, experts, weights, *plain, uncounted_bytes=sys.maxsize)
        },
        product=rows > 64 * groups,
        needs=FP8_PRODUCTS,
    )  # fmt: skip
