"""The weighted sum of the experts' results for each token.

out[t] = Σ_j topk_weights[t, j] · y[pair_rows[t, j]]        over the local pairs, in the order of j, in float32

Bits of a token: they depend on its rows in the order of j alone.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


def combine_reference(y: torch.Tensor, pair_rows: torch.Tensor, topk_weights: torch.Tensor | None) -> torch.Tensor:
    out = torch.zeros(pair_rows.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for j, pair_row in enumerate(pair_rows.t()):
        token = (pair_row >= 0).nonzero().flatten()
        rows = y[pair_row[token]].float()
        # No token is named twice in a column, so nothing depends on the order in which rows are added.
        out.index_add_(0, token, rows if topk_weights is None else rows.mul_(topk_weights[token, j, None]))
    return out.to(y.dtype)


@kernel
def combine_kernel(y, pair_rows, topk_weights, out, width, weight_stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """Part of one token a program: its K rows are loaded at once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        pair_row = tl.load(pair_rows + token * K + j).to(tl.int64)
        weight = 1.0
        if topk_weights is not None:
            weight = tl.load(topk_weights + token * weight_stride + j)
        row = tl.load(y + pair_row * width + columns, mask=inside & (pair_row >= 0), other=0.0).to(tl.float32)
        # Not weight · 0: the weight of a pair that is not local may be anything.
        total += tl.where(pair_row >= 0, weight * row, 0.0)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@operation(waits=True)
def combine(y: torch.Tensor, pair_rows: torch.Tensor, topk_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Weighted sum of every token's rows: the same bits each time.

    Args:
        y: ``[R, width]``, the experts' results in their order.
        pair_rows: int32 ``[T, k]``, rows of y; −1 is left out.
        topk_weights: float32 ``[T, k]``; 1 each where there are none.

    Returns:
        ``[T, width]`` in the dtype of y; zeros for a token whose pairs are all left out.
    """
    if pair_rows.dim() != 2 or y.dim() != 2 or (topk_weights is not None and topk_weights.shape != pair_rows.shape):
        shape = None if topk_weights is None else tuple(topk_weights.shape)
        raise ValueError(f"y {tuple(y.shape)}, pair_rows {tuple(pair_rows.shape)}, topk_weights {shape} do not fit")
    if pair_rows.dtype != torch.int32 or (topk_weights is not None and topk_weights.dtype != torch.float32):
        kind = None if topk_weights is None else topk_weights.dtype
        raise ValueError(f"pair_rows must be int32 and topk_weights float32, not {pair_rows.dtype} and {kind}")
    if not runs_triton(y):
        return combine_reference(y, pair_rows, topk_weights)
    tokens, k = pair_rows.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    if out.numel():
        # 16 bytes of each row a thread.
        block = min(1024, next_power_of_2(y.shape[1]))
        if topk_weights is not None and topk_weights.stride(1) != 1:
            topk_weights = topk_weights.contiguous()
        combine_kernel[(tokens, cdiv(y.shape[1], block))](
            y.contiguous(), pair_rows.contiguous(), topk_weights, out, y.shape[1],
            0 if topk_weights is None else topk_weights.stride(0), K=k, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return out
