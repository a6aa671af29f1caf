"""The weighted sum of the experts' results for each token, of numbers or of codes (a quantized combine).

out[t] = Σ_j topk_weights[t, j] · y[pair_rows[t, j]]        over the local pairs, in the order of j, in float32

Codes are e4m3 with a scale for each 128; each row is a rank's sum that was rounded so, and its weight is 1.

Bits of a token: they depend on its rows in the order of j alone.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import decode_e4m3
from dsa_engine.kernels.formats.quantize import BLOCK, codes_and_scales, quantized_words
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
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
        # 16 bytes of each row a thread. Compiled for sm_90, not yet measured on a device.
        block = min(1024, next_power_of_2(y.shape[1]))
        if topk_weights is not None and topk_weights.stride(1) != 1:
            topk_weights = topk_weights.contiguous()
        combine_kernel[(tokens, cdiv(y.shape[1], block))](
            y.contiguous(), pair_rows.contiguous(), topk_weights, out, y.shape[1],
            0 if topk_weights is None else topk_weights.stride(0), K=k, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return out


def combine_codes_reference(
    words: torch.Tensor, pair_rows: torch.Tensor, hidden: int, dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = codes_and_scales(words, hidden)
    y = codes.float().mul_(scales.repeat_interleave(BLOCK, dim=1)[:, :hidden])
    return combine_reference(y, pair_rows, None).to(dtype)


@kernel
def combine_codes_kernel(
    codes, scales, pair_rows, out, row_bytes, row_words, width,
    K: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Part of one token a program: its K rows are loaded at once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        pair_row = tl.load(pair_rows + token * K + j).to(tl.int64)
        here = inside & (pair_row >= 0)
        code = tl.load(codes + pair_row * row_bytes + columns, mask=here, other=0)
        scale = tl.load(scales + pair_row * row_words + columns // SCALED, mask=here, other=0.0)
        total += decode_e4m3(code, CONVERTS) * scale
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@operation(waits=True)
def combine_codes(words: torch.Tensor, pair_rows: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum of every token's rows: the same bits each time.

    Args:
        words: int32 ``[R, quantized_words(hidden)]``, as :func:`.quantize.quantize_tokens` makes them.
        pair_rows: int32 ``[T, k]``, rows of ``words``; −1 is left out.
        hidden: numbers of a row.
        dtype: of the result.

    Returns:
        ``[T, hidden]``; zeros for a token whose rows are all left out.
    """
    if words.dtype != torch.int32 or words.dim() != 2 or words.shape[1] != quantized_words(hidden):
        raise ValueError(f"{words.dtype} {tuple(words.shape)} are no codes and scales of rows of {hidden} numbers")
    if pair_rows.dim() != 2 or pair_rows.dtype != torch.int32:
        raise ValueError(f"pair_rows must be int32 [T, k], not {pair_rows.dtype} {tuple(pair_rows.shape)}")
    if not runs_triton(words):
        return combine_codes_reference(words, pair_rows, hidden, dtype)
    tokens, k = pair_rows.shape
    words = words.contiguous()
    out = torch.empty(tokens, hidden, dtype=dtype, device=words.device)
    if out.numel():
        codes, scales = codes_and_scales(words, hidden)
        # 8 bytes of each row a thread. Compiled for sm_90, not yet measured on a device.
        block = min(1024, next_power_of_2(hidden))
        combine_codes_kernel[(tokens, cdiv(hidden, block))](
            codes.view(torch.uint8), scales, pair_rows.contiguous(), out, codes.stride(0), scales.stride(0), hidden,
            K=k, BLOCK=block, SCALED=BLOCK, CONVERTS=chip_of(words).converts_e4m3, num_warps=max(1, block // 256),
        )  # fmt: skip
    return out
