"""A product with a plain weight.

    y = x · weightᵀ

PyTorch's product, but on a CPU for few rows, as in decode: it packs the weight and divides it over threads by its own
rules, which takes longer than reading the weight once (``native/linear.cpp``). There a row's result is the same bits
whatever rows are beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.operation import operation

# Largest number of rows for which the CPU's kernel is quicker, measured where the weight comes from memory.
FEW_ROWS_ON_A_CPU = 16


def _run_native(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (rows, width), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    threads = cpu.threads_for(rows * weight.numel())
    cpu.kernels().dsa_linear(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, outputs, x.stride(0), threads
    )
    return out


@operation(runs=cpu.serves)
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [..., in]`` by ``weight [out, in]``: ``[..., out]`` in their dtype.

    Raises:
        ValueError: widths that do not fit.
    """
    width = weight.shape[1]
    if x.shape[-1] != width:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {tuple(weight.shape)} of [out, in]")
    if x.numel() > FEW_ROWS_ON_A_CPU * width or not weight.is_contiguous() or not cpu.serves(x, weight):
        return F.linear(x, weight)
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = _run_native(rows, weight)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])
