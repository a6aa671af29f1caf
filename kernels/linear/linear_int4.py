"""A linear layer in packed INT4 (``int4.py``): the product of ``grouped_matmul_int4.py`` with one group."""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import (
    check_int4,
    grouped_matmul_int4_triton,
    matmul_int4_reference,
)
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


@operation()
def linear_int4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    *,
    columns: torch.Tensor | None = None,
    int8_activations: bool = False,
    largest: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x · weightᵀ`` with a packed weight.

    Args:
        x: ``[..., in]``, floating point.
        packed: int32 ``[out, in / 8]``, arranged by :func:`.formats.int4.arrange_int4_`.
        scale: ``[out, in / group]``, floating point.
        columns: int32 ``[in]``, the column of x that each column of the weight multiplies; None: the same column.
        int8_activations: W4A8; else W4A16, in x's dtype.
        largest: float32 ``[...]``, the largest magnitude of each whole row where x holds only some of its columns; of
            use with W4A8.

    Returns:
        ``[..., out]`` in x's dtype; each row depends on that row alone.
    """
    rows: torch.Tensor = x.reshape(-1, x.shape[-1])
    x_scale = None
    if int8_activations:
        rows, x_scale = quantize_rows_int8(rows, None if largest is None else largest.flatten())
    check_int4(rows, x_scale, packed[None], scale[None])
    if runs_triton(x):
        row_ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
        out = grouped_matmul_int4_triton(
            rows, x_scale, packed[None], scale[None], row_ends, x.dtype, columns=columns
        )  # fmt: skip
    else:
        rows = rows if columns is None else rows.index_select(1, columns)
        out = matmul_int4_reference(rows, x_scale, packed, scale, x.dtype)
    return out.view(*x.shape[:-1], packed.shape[0])
