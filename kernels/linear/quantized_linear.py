"""A linear layer in INT8 or INT4: the product of `grouped/` with one group.

y[r] = x[r] · weightᵀ          x quantised on the way where the format does so (``int8.py``, ``int4.py``)

Bits of a row: as of :mod:`.linear` and :mod:`.grouped.grouped_matmul`.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.grouped.products import Groups, ProductFormat, Weight, codes_of
from dsa_engine.kernels.linear.linear import FEW_ROWS_ON_A_CPU, run_native
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED, is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# PyTorch's product refuses fewer rows on CUDA, and for so few the kernel here reads weights as fast.
_ROWS_OF_INT_MM = 64


def takes_int_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch's ``_int_mm`` takes these codes on CUDA: many rows, of widths in steps of 8."""
    kernel = INTERPRETED or is_batch_invariant()
    return x.is_cuda and not kernel and x.shape[0] > _ROWS_OF_INT_MM and not any(n % 8 for n in weight.shape)


@operation(runs=cpu.runs_kernel)
def quantized_linear(
    x: torch.Tensor, weight: Weight, product: ProductFormat, largest: torch.Tensor | None = None
) -> torch.Tensor:
    """``x · weightᵀ`` with a weight in ``INT8``, ``W4A8`` or ``W4A16``.

    On CUDA many rows in INT8 take PyTorch's ``_int_mm``, which scales afterwards; all others take the kernel of the
    grouped product, which reads the weight once. On a CPU few rows take the C++ kernel, which reads it once, as it
    is stored; ``_int_mm`` is oneDNN's.

    Args:
        x: ``[..., in]``, floating point.
        weight: int8 ``[out, in]`` and float32 scales ``[out]``; or int32 ``[out, in / 8]``, arranged by
            :func:`.formats.int4.arrange_int4_`, scales ``[out, in / group]``, and None or int32 ``[in]``, the column of
            x that each column of the weight multiplies.
        product: ``INT8``, ``W4A8`` or ``W4A16``.
        largest: float32 ``[...]``, the largest magnitude of each whole row where x holds only some of its columns.

    Returns:
        ``[..., out]`` in x's dtype; each row depends on that row alone.
    """
    width = x.shape[-1]
    if cpu.takes(x.numel(), FEW_ROWS_ON_A_CPU * width) and largest is None and cpu.serves(x):
        codes, scale, *order = weight
        fits = codes is not None and codes.shape[-1] * product.packed == width
        if fits and codes is not None and product.on_a_cpu(x.dtype, (codes, scale)):
            columns = order[0] if order else None
            in_order = x if columns is None else x.index_select(-1, columns)
            return run_native(in_order, codes, scale, product.native)
    codes, x_scale = product.quantize(x.reshape(-1, x.shape[-1]), None if largest is None else largest.flatten())
    assert codes is not None
    one = [None if part is None else part[None] for part in weight]
    product.check(codes, x_scale, *one)
    matrix = codes_of(weight)
    if product is not INT8:  # whose sums are exact
        cpu.refuse_variant(x, f"a weight of {[part if part is None else tuple(part.shape) for part in weight]}")
    if not runs_triton(codes) or (product is INT8 and takes_int_mm(codes, matrix)):
        out = product.reference(codes, x_scale, *weight, x.dtype)
    else:
        row_ends = torch.full((1,), len(codes), dtype=torch.int32, device=x.device)
        out = product.product(codes, x_scale, *one, Groups(row_ends), x.dtype)
    return out.view(*x.shape[:-1], matrix.shape[0])
