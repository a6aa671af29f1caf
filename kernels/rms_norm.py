"""RMSNorm, with the residual addition that stands before it in a decoder layer.

y = weight * x / sqrt(mean(x²) + eps)        statistics in float32 over the last dimension
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises ``x [..., width]`` and scales it by ``weight [width]``; the result has the dtype of ``x``."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x has width {x.shape[-1]}, the weight has {weight.shape[0]}")
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, and its RMSNorm: returns ``(normed, summed)``, both ``[T, width]``."""
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ")
    summed = residual + x
    return rms_norm(summed, weight, eps), summed
