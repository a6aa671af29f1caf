"""DeepGEMM and PyTorch's own ``scaled_mm`` behind :func:`.block_scaled_matmul.block_scaled_linear`, for many rows.

Signatures of DeepGEMM 2.1.1 to 2.6.1 (``fp8_gemm_nt``) and of PyTorch 2.11 to 2.13, whose scales by block need Hopper.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from dsa_engine.kernels.formats.quantize import quantize_rows
from dsa_engine.kernels.linear.block_scaled_matmul import BLOCK, FEW_ROWS, packs_scales
from dsa_engine.kernels.runtime.libraries import adapter


def by_torch(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """PyTorch's product; cuBLAS wants the scales of ``x`` column by column, and a number of rows that 4 divides."""
    rows = x.shape[0]
    if missing := -rows % 4:
        x = torch.cat((x, x[:missing] if rows >= missing else x.new_zeros(missing, x.shape[1])))
        x_scale = F.pad(x_scale, (0, 0, 0, missing), value=1.0)
    scaled_by = F.ScalingType
    out = F.scaled_mm(
        x,
        weight.t(),
        x_scale.t().contiguous().t(),
        scaled_by.BlockWise1x128,
        weight_scale.t(),
        scaled_by.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out[:rows]


def by_deep_gemm(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """DeepGEMM's product, which lays out scales as it needs them; those that it packs must lie side by side."""
    x_scale = x_scale.contiguous() if packs_scales(x) else x_scale
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    import_module("deep_gemm").fp8_gemm_nt((x, x_scale), (weight, weight_scale), out)
    return out


def fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the libraries take a product of these sizes: whole blocks, and 4 of them along the sum."""
    out, inner = weight.shape
    return dtype == torch.bfloat16 and out % BLOCK == 0 and inner % (4 * BLOCK) == 0


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.numel() > FEW_ROWS * x.shape[-1] and fits(weight, x.dtype)


def _takes_scales(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **how: Any) -> bool:
    """From sm_100 on DeepGEMM packs scales as ue8m0 and ends the process's use of the device at any that is no power of
    two, so that those cannot be tried."""
    powers = how.get("power_of_two") and how.get("weight_power_of_two")
    return _takes(x, weight) and bool(powers or not packs_scales(x))


def _takes_torch(x: torch.Tensor, weight: torch.Tensor, *rest: Any, **how: Any) -> bool:
    return hasattr(F, "scaled_mm") and _takes(x, weight)


def _linear(
    product: Any, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, *, power_of_two: bool = False,
    quantized: tuple[torch.Tensor, torch.Tensor] | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    codes, scales = quantized or quantize_rows(x.reshape(-1, x.shape[-1]), BLOCK, power_of_two)
    return product(codes, scales, weight, weight_scale).view(*x.shape[:-1], weight.shape[0])


adapter("block_scaled_linear", "DeepGEMM's FP8 products", "deep_gemm", _takes_scales)(partial(_linear, by_deep_gemm))
adapter("block_scaled_linear", "PyTorch's scaled_mm", "torch", _takes_torch)(partial(_linear, by_torch))
