"""The experts of one rank in INT8; ``expert_mlp.py`` says what is summed.

A token is quantised once for all its experts, and the gated rows once more before they go down.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.int8 import quantize_rows_int8, quantize_rows_int8_reference
from dsa_engine.kernels.grouped.grouped_matmul_int8 import grouped_matmul_int8_reference, grouped_matmul_int8_triton
from dsa_engine.kernels.moe.expert_order import Order, local_experts
from dsa_engine.kernels.moe.experts import UNCOUNTED_BYTES, check_experts, sum_experts, sum_experts_reference
from dsa_engine.kernels.rows.silu_mul import silu_mul_reference
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


def expert_mlp_int8_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    def mlp(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        codes = quantize_rows_int8_reference(rows)
        hidden = silu_mul_reference(grouped_matmul_int8_reference(*codes, *gate_up, counts, rows.dtype))
        codes = quantize_rows_int8_reference(hidden)
        return grouped_matmul_int8_reference(*codes, *down, counts, rows.dtype)

    return sum_experts_reference(x, experts, weights, gate_up[0].shape[0], mlp)


@operation(waits=True)
def expert_mlp_int8(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    *,
    first: int | None = None,
    served_fraction: float = 1.0,
    served: int | None = None,
    uncounted_bytes: int = UNCOUNTED_BYTES,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token.

    Args:
        x, experts, weights, first, served_fraction, served, uncounted_bytes: as in :func:`.expert_mlp.expert_mlp`.
        gate_up: int8 ``[experts, 2·intermediate, hidden]`` and its float32 scales ``[experts, 2·intermediate]``.
        down: int8 ``[experts, hidden, intermediate]`` and its float32 scales ``[experts, hidden]``.

    Returns:
        ``[T, hidden]`` in x's dtype, summed in float32; zeros for a token without experts here.
    """
    intermediate, hidden = down[0].shape[2], x.shape[1]
    check_experts(x, experts, weights, gate_up[0], down[0], intermediate)
    if not runs_triton(x):
        experts = local_experts(experts, len(down[0]), first)
        return expert_mlp_int8_reference(x, experts, weights, gate_up, down)

    def mlp(order: Order, expected: float) -> torch.Tensor:
        gated = grouped_matmul_int8_triton(
            *quantize_rows_int8(x),
            *gate_up,
            order.row_ends,
            x.dtype,
            source=order.tokens,
            gated=True,
            expected=expected,
        )
        return grouped_matmul_int8_triton(*quantize_rows_int8(gated), *down, order.row_ends, x.dtype, expected=expected)

    return sum_experts(
        experts, weights, mlp, count=len(down[0]), first=first,
        row_bytes=intermediate * (x.element_size() + 1) + hidden * x.element_size(),
        served_fraction=served_fraction, served=served, uncounted_bytes=uncounted_bytes,
    )  # fmt: skip
