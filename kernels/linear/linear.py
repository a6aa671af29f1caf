"""A product with a plain weight.

    y = x · weightᵀ

PyTorch's product, but on a CPU for few rows, as in decode: it packs the weight and divides it over threads by its own
rules, which takes longer than reading the weight once (``native/linear.cpp``). The C++ kernel reads weights of every
format as they are stored. A row's result is the same bits whatever rows, and however many, are beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.operation import operation

# Largest number of rows for which the CPU's kernel is quicker, measured where the weight comes from memory.
FEW_ROWS_ON_A_CPU = 16


def run_native(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, kind: int = 0, power_of_two: bool = False
) -> torch.Tensor:
    """Runs ``native/linear.cpp``.

    Args:
        x: ``[..., in]``, of a dtype that :func:`.cpu.serves` takes.
        weight: ``[out, in]``, contiguous, of a kind that ``native/products.h`` knows, and its ``scale``.

    Returns:
        ``[..., out]`` in x's dtype.
    """
    width, outputs = x.shape[-1], weight.shape[0]
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = rows.new_empty(len(rows), outputs)
    library, group = cpu.kernels(), 0 if scale is None else width // scale.shape[-1]
    scratch = None
    if kind or x.dtype != torch.float32:
        scratch = torch.empty(library.dsa_linear_scratch(len(rows), width), dtype=torch.uint8)
    library.dsa_linear(
        rows.data_ptr(), weight.data_ptr(), None if scale is None else scale.data_ptr(), out.data_ptr(),
        None if scratch is None else scratch.data_ptr(), cpu.TYPES[x.dtype], kind,
        cpu.TYPES[x.dtype if scale is None else scale.dtype], group, power_of_two, len(rows), width, outputs,
        rows.stride(0), cpu.threads_for(len(rows) * width * outputs),
    )  # fmt: skip
    return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)


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
    return run_native(x, weight)
