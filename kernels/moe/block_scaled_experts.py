"""The experts of one rank in FP8: activations quantised 1 × 128, weights in 128 × 128 blocks.

    h[r] = silu(gate[e] · x[t]) · (up[e] · x[t])      x quantised; sums and gate in float32
    y[r] = down[e] · h[r]                             h quantised straight from float32, rounded nowhere between
    out[t] = Σ_j weight[t, j] · y[r(t, j)]            e = expert[t, j];  −1: served elsewhere

Products are those of `grouped/grouped_matmul_fp8.py`; rows are sorted by expert as in :mod:`.experts`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.kernels.formats.quantize import quantize_rows, quantize_rows_reference
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import BLOCK, gate_and_up, grouped_product
from dsa_engine.kernels.grouped.tiles import rows_by_group
from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_matmul_reference, check_weight
from dsa_engine.kernels.moe.expert_order import Order, local_experts
from dsa_engine.kernels.moe.experts import UNCOUNTED_BYTES, check_experts, sum_experts, sum_experts_reference
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


def quantized_words(hidden: int) -> int | None:
    """Width of :func:`quantize_tokens`; None: tokens of so many numbers cannot be words."""
    return hidden // 4 + cdiv(hidden, BLOCK) if hidden % 4 == 0 else None


def quantize_tokens(tokens: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Quantises tokens ``[T, hidden]`` as the experts do, with the scales of a token beside its codes: int32
    ``[T, quantized_words(hidden)]``, so that they travel as one row."""
    count, hidden = tokens.shape
    words = torch.empty(count, hidden // 4 + cdiv(hidden, BLOCK), dtype=torch.int32, device=tokens.device)
    codes, scales = codes_and_scales(words, hidden)
    quantize_rows(tokens, BLOCK, power_of_two, codes=codes, scales=scales)
    return words


def codes_and_scales(words: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes ``[T, hidden]`` and scales ``[T, ceil(hidden / 128)]`` of :func:`quantize_tokens`: views."""
    return words[:, : hidden // 4].view(torch.float8_e4m3fn), words[:, hidden // 4 :].view(torch.float32)


def block_scaled_experts_reference(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, gate_up_scale: torch.Tensor,
    down: torch.Tensor, down_scale: torch.Tensor, power_of_two: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The definition."""
    words, hidden_size = x.dtype == torch.int32, down.shape[1]

    def mlp(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), hidden_size, dtype=dtype, device=x.device)
        for expert, part in rows_by_group(counts):
            quantized = (
                codes_and_scales(rows[part], hidden_size)
                if words
                else quantize_rows_reference(rows[part], BLOCK, power_of_two)
            )
            gate, up = (
                block_scaled_matmul_reference(*quantized, *half)
                for half in zip(gate_up[expert], gate_up_scale[expert], strict=True)
            )
            hidden = quantize_rows_reference(F.silu(gate).mul_(up), BLOCK, power_of_two)
            out[part] = block_scaled_matmul_reference(*hidden, down[expert], down_scale[expert])
        return out

    return sum_experts_reference(x, experts, weights, down.shape[0], mlp)


@operation(waits=True)
def block_scaled_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    power_of_two: bool = False,
    dtype: torch.dtype | None = None,
    first: int | None = None,
    served_fraction: float = 1.0,
    served: int | None = None,
    uncounted_bytes: int = UNCOUNTED_BYTES,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token, in FP8.

    Args:
        x: ``[T, hidden]``; or what :func:`quantize_tokens` has made of it, with the same result.
        experts, weights, first, served_fraction, served, uncounted_bytes: as in :func:`.expert_mlp.expert_mlp`.
        gate_up: ``[experts, 2, intermediate, hidden]`` float8_e4m3fn, gate before up.
        gate_up_scale: ``[experts, 2, ceil(intermediate / 128), ceil(hidden / 128)]`` float32.
        down: ``[experts, hidden, intermediate]`` float8_e4m3fn.
        down_scale: ``[experts, ceil(hidden / 128), ceil(intermediate / 128)]`` float32.
        power_of_two: round the scales of activations up to powers of two.
        dtype: of the result; default: x's.

    Returns:
        ``[T, hidden]``, summed in float32; zeros for a token without experts here.

    Raises:
        TypeError, ValueError: dtypes or shapes that do not fit.
    """
    check_weight(gate_up, gate_up_scale)
    check_weight(down, down_scale)
    hidden, words = down.shape[1], x.dtype == torch.int32
    if words and (dtype is None or x.shape[1] != quantized_words(hidden)):
        raise ValueError(f"quantised tokens of {hidden} numbers are not {tuple(x.shape)}, or their dtype is not given")
    dtype = dtype or x.dtype
    check_experts(x[:, :1].expand(-1, hidden) if words else x, experts, weights, gate_up, down, down.shape[2])
    if not runs_triton(x):
        experts = local_experts(experts, len(down), first)
        return block_scaled_experts_reference(
            x, experts, weights, gate_up, gate_up_scale, down, down_scale, power_of_two, dtype
        )

    def mlp(order: Order, expected: float) -> torch.Tensor:
        codes, scales = codes_and_scales(x, hidden) if words else quantize_rows(x, BLOCK, power_of_two)
        gated = gate_and_up(
            codes, scales, order.tokens, order.row_ends, gate_up, gate_up_scale, power_of_two=power_of_two,
            expected=expected,
        )  # fmt: skip
        return grouped_product(*gated, order.row_ends, down, down_scale, dtype, expected)

    return sum_experts(
        experts, weights, mlp, count=len(down), first=first, row_bytes=down.shape[2] + hidden * dtype.itemsize,
        served_fraction=served_fraction, served=served, uncounted_bytes=uncounted_bytes,
    )  # fmt: skip
