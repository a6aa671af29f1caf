"""Block-scaled FP8 products by kernels of other libraries, if a device and an installation have them.

Two are known: DeepGEMM, where it is installed, and PyTorch's own ``scaled_mm`` with scales by block, which it has on
Hopper. Each is tried once on a device, on a small product, and is only used where that comes out right: an installation
may lack a compiler, a library or a kernel for the chip, and none of that should end a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from dsa_engine.kernels.formats.fp8 import dequantize_blocks_reference
from dsa_engine.kernels.runtime.launch import capability
from dsa_engine.kernels.runtime.operation import first_line

logger = logging.getLogger(__name__)

# (x [R, in], x_scale [R, in / 128], weight [out, in], weight_scale [out / 128, in / 128]) -> bfloat16 [R, out]
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_BLOCK = 128


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
    """DeepGEMM's product (version 2), which lays out scales as it needs them."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    import_module("deep_gemm").fp8_gemm_nt((x, x_scale), (weight, weight_scale), out)
    return out


def takes(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the libraries take a product of these sizes: whole blocks, and 4 of them along the sum."""
    out, inner = weight.shape
    return x.is_cuda and dtype == torch.bfloat16 and out % _BLOCK == 0 and inner % (4 * _BLOCK) == 0


def library_product(device: torch.device, powers_of_two: bool) -> Product | None:
    """The library's product to use on a device for many rows; None: our kernel.

    Args:
        powers_of_two: whether the scales of activations and weight are. From sm_100 on DeepGEMM packs scales as ue8m0
            and ends the process's use of the device at any other scale, so that other ones cannot be tried.
    """
    return _tried_product(device, powers_of_two or not packs_scales(device))


def packs_scales(device: torch.device) -> bool:
    """Whether a library may pack scales as ue8m0 on this device."""
    return capability(torch.empty(0, device=device)) >= 100


def are_powers_of_two(scales: torch.Tensor) -> bool:
    """Whether float32 ``scales`` are powers of two, or 0; waits for the device."""
    return bool((scales.view(torch.int32) & 0x807FFFFF == 0).all())


@cache
def _tried_product(device: torch.device, any_library: bool) -> Product | None:
    for name, product, there in (
        ("DeepGEMM", by_deep_gemm, any_library and find_spec("deep_gemm") is not None),
        ("PyTorch's scaled_mm", by_torch, hasattr(F, "scaled_mm")),
    ):
        if not there:
            continue
        try:
            error = _error_of(product, device)
        except Exception as problem:  # whatever another library raises, there is a kernel of ours
            logger.info("%s is not used for FP8 products: %s", name, first_line(problem))
            continue
        if error < 1e-2:
            logger.info("%s multiplies FP8 blocks", name)
            return product
        logger.warning("%s is not used for FP8 products: a small one came out wrong by %.1e", name, error)
    return None


def _error_of(product: Product, device: torch.device) -> float:
    """‖difference‖ / ‖result‖ of a product of 72 rows with scales of many sizes."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 512, generator=g).to(torch.float8_e4m3fn) for n in (72, 256))
    x_scale, weight_scale = (2.0 ** torch.randint(-4, 4, shape, generator=g) for shape in ((72, 4), (2, 4)))
    wanted = (x.float() * x_scale.repeat_interleave(_BLOCK, dim=1)) @ dequantize_blocks_reference(
        weight, weight_scale, (_BLOCK, _BLOCK)
    ).t()
    result = product(*(t.to(device) for t in (x, x_scale, weight, weight_scale))).float().cpu()
    return float((result - wanted).norm() / wanted.norm())
