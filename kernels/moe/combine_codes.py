"""Quantized combine: the sum of each token's rows, which come back in FP8: codes in e4m3, and a scale for each 128.

out[t] = Σ_j codes[pair_rows[t, j]] · scales[pair_rows[t, j]]        in the order of j, in float32

Bits of a token: they depend on its rows in the order of j, each of which is a rank's sum that was rounded to FP8.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import decode_e4m3
from dsa_engine.kernels.formats.quantize import BLOCK, codes_and_scales, quantized_words
from dsa_engine.kernels.moe.combine import combine_reference
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation


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
        # 8 bytes of each row a thread.
        block = min(1024, next_power_of_2(hidden))
        combine_codes_kernel[(tokens, cdiv(hidden, block))](
            codes.view(torch.uint8), scales, pair_rows.contiguous(), out, codes.stride(0), scales.stride(0), hidden,
            K=k, BLOCK=block, SCALED=BLOCK, CONVERTS=chip_of(words).converts_e4m3, num_warps=max(1, block // 256),
        )  # fmt: skip
    return out
