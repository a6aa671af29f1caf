"""The gate of a SwiGLU feed-forward layer:  y = silu(gate) · up,  with gate and up side by side in one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[T, 2·width]`` (gate, then up) to ``[T, width]``."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even width, not {gate_up.shape[-1]}")
    return silu_mul_reference(gate_up)
