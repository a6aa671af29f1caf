"""A product with a matrix for each head: W_UK into the queries, W_UV after the attention (DeepSeek-V2, section 2.1.2).

    out[t, h] = x[t, h] · weight[h]

PyTorch's batched product, but on a CPU one that packs and copies nothing (``cpu/linear.cpp``).

Bits of a token: as of :mod:`.linear`.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.grouped.grouped_matmul import grouped_matmul_triton
from dsa_engine.kernels.grouped.products import Groups
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Largest number of tokens for which it is quicker with a matrix whose columns are contiguous, as W_UV's are; with
# contiguous rows it always is (measured at 32 × 64 and 128 × 512).
_FEW_TOKENS_ON_A_CPU = 8


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The grouped product with a group for each head: ``[T, heads, out]``."""
    tokens, heads, inner = x.shape
    x = x if x.stride() == (heads * x.stride(1), x.stride(1), 1) else x.clone(memory_format=torch.contiguous_format)
    rows = torch.arange(tokens * heads, dtype=torch.int32, device=x.device).view(tokens, heads)
    row_ends = torch.arange(tokens, tokens * heads + 1, tokens, dtype=torch.int32, device=x.device)
    flat = x.as_strided((tokens * heads, inner), (x.stride(1), 1), x.storage_offset())
    products = grouped_matmul_triton(flat, weight.transpose(1, 2), Groups(row_ends, rows.t().flatten()))
    return products.view(heads, tokens, -1).transpose(0, 1)


def split_matrices(both: torch.Tensor, first: int, *, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK ``[heads, first, in]`` and W_UV, the other rows, of ``both [heads, rows, in]``, in its memory; ``fixed``: as
    Triton's kernel reads them under :func:`.launch.batch_invariance`."""
    w_uk, w_uv = both[:, :first], both[:, first:]
    if not fixed or not runs_triton(both):
        return w_uk, w_uv
    turned, values = w_uk.mT.contiguous(), w_uv.contiguous()
    w_uk, w_uv = both.flatten().split((turned.numel(), values.numel()))
    return w_uk.view_as(turned).copy_(turned).mT, w_uv.view_as(values).copy_(values)


@operation(writes=("out",), runs=cpu.runs_product)
def per_head_matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``x [T, heads, in]`` by ``weight [heads, in, out]`` into ``out [T, heads, out]``, of one dtype, strided as they
    may be.
    """
    (tokens, heads, inner), outer = x.shape, weight.shape[-1]
    if weight.shape != (heads, inner, outer) or out.shape != (tokens, heads, outer):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)} do not fit")
    if tokens and is_batch_invariant() and runs_triton(x):
        out.copy_(_by_head(x, weight))
    elif (
        cpu.serves(x, weight, out)
        and x.stride(2) == out.stride(2) == 1
        and (weight.stride(2) == 1 or (weight.stride(1) == 1 and cpu.takes(tokens, _FEW_TOKENS_ON_A_CPU)))
    ):
        cpu.kernels().dsa_per_head_matmul(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), cpu.TYPES[x.dtype], tokens, heads, inner, outer,
            x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
            cpu.threads_for(tokens * weight.numel()),
        )  # fmt: skip
    elif tokens:
        cpu.refuse_variant(x, f"a matrix for each head with strides {weight.stride()}")
        cpu.multiply(x.transpose(0, 1), weight, out.transpose(0, 1))
