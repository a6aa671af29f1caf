"""A product with a plain weight.

    y = x · weightᵀ

PyTorch's product, but on a CPU for few rows, as in decode: it packs the weight and divides it over threads by its own
rules, which takes longer than reading the weight once (``cpu/linear.cpp``). The C++ kernel reads weights of every
format as they are stored.

Bits of a row: of kernels they depend on the row and the weight alone. PyTorch's product chooses tiles and orders of
sums by the number of rows; so under :func:`.launch.batch_invariance` any number takes the CPU's kernel, or the grouped
product with one group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.kernels.grouped.grouped_matmul import grouped_matmul_triton
from dsa_engine.kernels.grouped.products import Groups
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Largest number of rows for which the CPU's kernel is quicker, measured where the weight comes from memory.
FEW_ROWS_ON_A_CPU = 16


def run_native(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, kind: int = 0, power_of_two: bool = False
) -> torch.Tensor:
    """Runs ``cpu/linear.cpp``.

    Args:
        x: ``[..., in]``, of a dtype that :func:`.cpu.serves` takes.
        weight: ``[out, in]``, contiguous, of a kind that ``cpu/products.h`` knows, and its ``scale``.

    Returns:
        ``[..., out]`` in x's dtype.
    """
    width, outputs = x.shape[-1], weight.shape[0]
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    count, group, scales = rows.shape[0], 0, None
    type_ = weight_type = cpu.TYPES[x.dtype]
    if scale is not None:
        group, scales, weight_type = width // scale.shape[-1], scale.data_ptr(), cpu.TYPES[scale.dtype]
    out = rows.new_empty(count, outputs)
    cpu.kernels().dsa_linear(
        rows.data_ptr(), weight.data_ptr(), scales, out.data_ptr(), type_, kind, weight_type, group, power_of_two,
        count, width, outputs, rows.stride(0), cpu.threads_for(count * width * outputs),
    )  # fmt: skip
    return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)


@operation(runs=cpu.runs_product)
def linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x [..., in]`` by ``weight [out, in]``: ``[..., out]`` in their dtype.

    Args:
        dtype: float32, where half types on CUDA are not to be rounded; then x is 2D.
    """
    width = weight.shape[1]
    if x.shape[-1] != width:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {tuple(weight.shape)} of [out, in]")
    if is_batch_invariant() and runs_triton(x):
        rows = x.reshape(-1, width)
        one = Groups(torch.full((1,), len(rows), dtype=torch.int32, device=x.device))
        return grouped_matmul_triton(rows, weight[None], one, dtype).view(*x.shape[:-1], weight.shape[0])
    fits = dtype in (None, x.dtype) and weight.is_contiguous() and cpu.serves(x, weight)
    if fits and cpu.takes(x.numel(), FEW_ROWS_ON_A_CPU * width):
        return run_native(x, weight)
    cpu.refuse_variant(x, f"a weight {weight.dtype} with strides {weight.stride()}")
    if dtype not in (None, x.dtype):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    if not cpu.expands(x):
        return F.linear(x, weight)
    rows, outputs = x.reshape(x.shape[:-1].numel(), width), weight.shape[0]
    return cpu.multiply(rows, weight.t(), rows.new_empty(len(rows), outputs)).view(*x.shape[:-1], outputs)
