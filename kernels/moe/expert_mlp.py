"""The experts of one rank, over token-expert pairs that are sorted by expert.

out[t] = Σ_j weight[t, j] · down[e] · silu_mul(gate_up[e] · x[t]),   e = expert[t, j];  −1: served elsewhere
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.grouped.grouped_matmul import (
    grouped_matmul_reference,
    grouped_matmul_torch,
    grouped_matmul_triton,
    torch_has_it,
)
from dsa_engine.kernels.moe.expert_order import Order, local_experts
from dsa_engine.kernels.moe.experts import UNCOUNTED_BYTES, check_experts, sum_experts, sum_experts_reference
from dsa_engine.kernels.rows.silu_mul import silu_mul, silu_mul_reference
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Largest average number of rows of an expert for which products are bound by reading the weights.
FEW_ROWS = 64

# The same for the CPU's kernel, which reads weights once and multiplies rows less well than PyTorch's products.
_FEW_ROWS_ON_A_CPU = 8


def expert_mlp_reference(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    def mlp(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return grouped_matmul_reference(
            silu_mul_reference(grouped_matmul_reference(rows, gate_up, counts)), down, counts
        )

    return sum_experts_reference(x, experts, weights, gate_up.shape[0], mlp)


def row_bytes(gate_up: torch.Tensor, down: torch.Tensor) -> int:
    """Largest number of bytes of a row between the products: its token, gate and up, and the result."""
    return (gate_up.shape[1] + 2 * down.shape[1]) * down.element_size()


def experts_fused(
    x: torch.Tensor, order: Order, gate_up: torch.Tensor, down: torch.Tensor, expected: float
) -> torch.Tensor:
    """The experts' results ``[R, hidden]`` in two launches: rows are gathered and gated within the products."""
    hidden = grouped_matmul_triton(x, gate_up, order.row_ends, source=order.tokens, gated=True, expected=expected)
    return grouped_matmul_triton(hidden, down, order.row_ends, expected=expected)


def experts_by_torch(x: torch.Tensor, order: Order, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same with PyTorch's grouped products, between which gathered rows, gate and up are written and read."""
    hidden = silu_mul(grouped_matmul_torch(x.index_select(0, order.tokens), gate_up, order.row_ends))
    return grouped_matmul_torch(hidden, down, order.row_ends)


def _run_native(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Runs ``native/expert_mlp.cpp``: a thread takes an expert at a time."""
    (tokens, choices), (count, hidden, intermediate) = experts.shape, down.shape
    library = cpu.kernels()
    out = torch.empty_like(x)
    threads = min(count, cpu.threads_for(3 * experts.numel() * hidden * intermediate))
    scratch = x.new_empty(library.dsa_expert_mlp_scratch(experts.numel(), count, hidden, intermediate))
    outside = library.dsa_expert_mlp(
        x.data_ptr(), experts.data_ptr(), weights.data_ptr(), gate_up.data_ptr(), down.data_ptr(), out.data_ptr(),
        scratch.data_ptr(), tokens, choices, count, hidden, intermediate, threads,
    )  # fmt: skip
    if outside:
        raise IndexError(f"experts must be below {count}, how many there are here, not {int(experts.max())}")
    return out


@operation(runs=cpu.runs_kernel, waits=True)
def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    first: int | None = None,
    served_fraction: float = 1.0,
    served: int | None = None,
    uncounted_bytes: int = UNCOUNTED_BYTES,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token.

    On CUDA, experts with few rows each (64, on average) take the fused kernel: rows are gathered and gated within the
    products. With more rows PyTorch's ``grouped_mm`` is taken where it applies. Sums add in the order of a token's
    choices, so that a result is the same bits each time. On a CPU few rows (8, on average) take its own kernel.

    Args:
        x: ``[T, hidden]``.
        experts: ``[T, k]`` int32 numbers within this rank's experts, −1 for choices that other ranks serve.
        weights: ``[T, k]`` float32.
        gate_up: ``[experts, 2·intermediate, hidden]``.
        down: ``[experts, hidden, intermediate]``.
        first: number of this rank's first expert, if experts are numbered over all ranks; −1 need not mark others then.
        served_fraction: expected fraction of the choices that are served here: chooses the kernel, never the result.
        served: number of choices that are served here, where the host knows it.
        uncounted_bytes: largest number of bytes of rows for which unserved choices get rows too, so that
            nothing waits for the device (decode, CUDA graphs).

    Returns:
        ``[T, hidden]`` in x's dtype, summed in float32; zeros for a token without experts here.

    Raises:
        ValueError: shapes that do not fit together.
        IndexError: on a CPU, experts that are not here.
    """
    check_experts(x, experts, weights, gate_up, down, down.shape[2])
    if not runs_triton(x):
        experts = local_experts(experts, gate_up.shape[0], first)
        few = experts.numel() <= _FEW_ROWS_ON_A_CPU * gate_up.shape[0]
        if few and gate_up.is_contiguous() and down.is_contiguous() and cpu.serves(x, weights, gate_up, down):
            return _run_native(x.contiguous(), experts.int().contiguous(), weights.contiguous(), gate_up, down)
        return expert_mlp_reference(x, experts, weights, gate_up, down)

    def mlp(order: Order, expected: float) -> torch.Tensor:
        few = expected <= FEW_ROWS * gate_up.shape[0]
        # PyTorch's way also gathers and gates the rows that no expert here serves: many, where they were not counted.
        mostly_served = len(order.tokens) <= 2 * expected
        if torch_has_it(x, gate_up) and torch_has_it(x, down) and mostly_served and not few:
            return experts_by_torch(x, order, gate_up, down)
        return experts_fused(x, order, gate_up, down, expected)

    return sum_experts(
        experts, weights, mlp, count=gate_up.shape[0], first=first, row_bytes=row_bytes(gate_up, down),
        served_fraction=served_fraction, served=served, uncounted_bytes=uncounted_bytes,
    )  # fmt: skip
