"""Merging attention over disjoint sets of rows by log-sum-exp.

    lse = ln Σ_s exp(lse_s)      out = Σ_s exp(lse_s − lse) · out_s

A part that attended to nothing has a log-sum-exp of −inf, weighs nothing and may hold anything; if all are such, the
result is zero and its log-sum-exp −inf.

Bits of a row: they depend on its parts in their order alone.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Columns of a program: a warp reads 16 bytes a thread of each part.
_COLUMNS = 128


def merge_splits_reference(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = partial_lse.softmax(dim=0).nan_to_num(0.0)[..., None]  # NaN where all parts are −inf
    parts = torch.where(weights > 0, weights * partial_out, 0.0)  # in float32
    return parts.sum(dim=0).to(dtype), torch.logsumexp(partial_lse, dim=0)


@kernel
def merge_splits_kernel(
    partial_out, partial_lse, out, lse, rows, splits, VALUE: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One row (a token's head), COLUMNS of its columns: all parts at once, as a tile [SPLITS, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part_row = split.to(tl.int64) * rows + row
    part_lse = tl.load(partial_lse + part_row, mask=split < splits, other=float("-inf"))
    top = tl.max(part_lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(part_lse - top)
    some = tl.sum(weights, 0)
    total = tl.where(some > 0, some, 1.0)
    mask = (weights > 0)[:, None] & (columns < VALUE)[None, :]
    parts = tl.load(partial_out + part_row[:, None] * VALUE + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + row * VALUE + columns, result.to(out.dtype.element_ty), mask=columns < VALUE)
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(some > 0, top + tl.log(total), float("-inf")))


@operation()
def merge_splits(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of what the parts attended to.

    Args:
        partial_out: ``[S, T, heads, value_dim]``, float32 or as other ranks send it, contiguous.
        partial_lse: ``[S, T, heads]`` float32 natural logarithms, contiguous; −inf for a part without rows.
        dtype: dtype of the result.

    Returns:
        out ``[T, heads, value_dim]`` and log-sum-exp ``[T, heads]`` float32.
    """
    if partial_out.dim() != 4 or partial_out.shape[:3] != partial_lse.shape or not partial_out.shape[0]:
        raise ValueError(
            f"parts must be [S, T, heads, value_dim] with a log-sum-exp [S, T, heads] and S > 0, not "
            f"{tuple(partial_out.shape)} and {tuple(partial_lse.shape)}"
        )
    if not partial_out.is_floating_point() or partial_lse.dtype != torch.float32:
        raise ValueError(
            f"parts must be floats and their log-sum-exp float32, not {partial_out.dtype} and {partial_lse.dtype}"
        )
    if not runs_triton(partial_out):
        return merge_splits_reference(partial_out, partial_lse, dtype)
    splits, tokens, heads, value_dim = partial_out.shape
    out = torch.empty(tokens, heads, value_dim, dtype=dtype, device=partial_out.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=partial_out.device)
    rows = tokens * heads
    if rows and value_dim:
        padded = next_power_of_2(splits)
        merge_splits_kernel[(rows, cdiv(value_dim, _COLUMNS))](
            partial_out.contiguous(), partial_lse.contiguous(), out, lse, rows, splits,
            VALUE=value_dim, SPLITS=padded, COLUMNS=_COLUMNS, num_warps=max(1, min(8, padded // 16)),
        )  # fmt: skip
    return out, lse
