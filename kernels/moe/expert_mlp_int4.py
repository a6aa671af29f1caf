"""The experts of one rank in packed INT4; ``expert_mlp.py`` says what is summed.

W4A16 multiplies tokens as they are. W4A8 quantises a token once, and the gated rows once more before they go down.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import grouped_matmul_int4_reference, grouped_matmul_int4_triton
from dsa_engine.kernels.moe.expert_order import Order, local_experts
from dsa_engine.kernels.moe.experts import UNCOUNTED_BYTES, check_experts, sum_experts, sum_experts_reference
from dsa_engine.kernels.rows.silu_mul import silu_mul_reference
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# The orders of the columns of gate and up, and of down; None: x is read in order.
Orders = tuple[torch.Tensor | None, torch.Tensor | None]


def _rows(x: torch.Tensor, int8_activations: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    return quantize_rows_int8(x) if int8_activations else (x, None)


def expert_mlp_int4_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    int8_activations: bool,
    columns: Orders = (None, None),
) -> torch.Tensor:
    def mlp(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        hidden = silu_mul_reference(
            grouped_matmul_int4_reference(*_rows(rows, int8_activations), *gate_up, counts, rows.dtype, columns[0])
        )
        return grouped_matmul_int4_reference(*_rows(hidden, int8_activations), *down, counts, rows.dtype, columns[1])

    return sum_experts_reference(x, experts, weights, gate_up[0].shape[0], mlp)


@operation(waits=True)
def expert_mlp_int4(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    *,
    columns: Orders = (None, None),
    int8_activations: bool = False,
    first: int | None = None,
    served_fraction: float = 1.0,
    served: int | None = None,
    uncounted_bytes: int = UNCOUNTED_BYTES,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token.

    Args:
        x, experts, weights, first, served_fraction, served, uncounted_bytes: as in :func:`.expert_mlp.expert_mlp`.
        gate_up: int32 ``[experts, 2·intermediate, hidden / 8]`` and its scales ``[…, hidden / size]``.
        down: int32 ``[experts, hidden, intermediate / 8]`` and its scales ``[…, intermediate / size]``; both
            arranged by :func:`.formats.int4.arrange_int4_`.
        columns: for each, the column of its input that each column multiplies: int32 ``[experts, hidden]`` or, where
            gate and up differ, ``[experts, 2, hidden]``; and ``[experts, intermediate]``. None: the same column.
        int8_activations: W4A8; else W4A16, in x's dtype.

    Returns:
        ``[T, hidden]`` in x's dtype, summed in float32; zeros for a token without experts here.
    """
    intermediate, hidden = down[0].shape[2] * 8, x.shape[1]
    check_experts(x, experts, weights, gate_up[0], down[0], intermediate, packed=8)
    if not runs_triton(x):
        experts = local_experts(experts, len(down[0]), first)
        return expert_mlp_int4_reference(x, experts, weights, gate_up, down, int8_activations, columns)

    def mlp(order: Order, expected: float) -> torch.Tensor:
        gated = grouped_matmul_int4_triton(
            *_rows(x, int8_activations), *gate_up, order.row_ends, x.dtype,
            source=order.tokens, gated=True, expected=expected, columns=columns[0],
        )  # fmt: skip
        codes = _rows(gated, int8_activations)
        return grouped_matmul_int4_triton(
            *codes, *down, order.row_ends, x.dtype, expected=expected, columns=columns[1]
        )  # fmt: skip

    return sum_experts(
        experts, weights, mlp, count=len(down[0]), first=first,
        row_bytes=intermediate * (x.element_size() + int8_activations) + hidden * x.element_size(),
        served_fraction=served_fraction, served=served, uncounted_bytes=uncounted_bytes,
    )  # fmt: skip
