"""A linear layer in INT8: rows are quantised on the way (``int8.py``), products are summed in int32.

y[r] = x_scale[r] · scale · (weight · code(x[r]))
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul_int8 import check_int8, grouped_matmul_int8_triton, matmul_int8_reference
from dsa_engine.kernels.runtime.launch import INTERPRETED, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# PyTorch's product refuses fewer rows on CUDA, and for so few the kernel here reads weights as fast.
_ROWS_OF_INT_MM = 64


def torch_has_it(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch's ``_int_mm`` takes these codes on CUDA: many rows, of widths in steps of 8."""
    return x.is_cuda and not INTERPRETED and x.shape[0] > _ROWS_OF_INT_MM and not any(n % 8 for n in weight.shape)


@operation()
def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor | None = None
) -> torch.Tensor:
    """``x · weightᵀ`` with weights and activations in INT8.

    On CUDA many rows take PyTorch's ``_int_mm``, few rows, as in decode, the kernel of the grouped product with one
    group, which reads the weights once and scales in the same launch. On a CPU ``_int_mm`` is oneDNN's.

    Args:
        x: ``[..., in]``, floating point.
        weight: int8 ``[out, in]``.
        scale: float32 ``[out]``.
        largest: float32 ``[...]``, the largest magnitude of each whole row where x holds only some of its columns.

    Returns:
        ``[..., out]`` in x's dtype; each row depends on that row alone.
    """
    codes, x_scale = quantize_rows_int8(x.reshape(-1, x.shape[-1]), None if largest is None else largest.flatten())
    check_int8(codes, x_scale, weight[None], scale[None])
    if not runs_triton(codes) or torch_has_it(codes, weight):
        out = matmul_int8_reference(codes, x_scale, weight, scale, x.dtype)
    else:
        row_ends = torch.full((1,), codes.shape[0], dtype=torch.int32, device=x.device)
        out = grouped_matmul_int8_triton(codes, x_scale, weight[None], scale[None], row_ends, x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])
