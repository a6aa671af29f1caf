"""Tokens in FP8 as they travel: the codes of a token and their scales side by side, as int32 words of one row."""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.quantize import quantize_rows
from dsa_engine.kernels.runtime.integers import cdiv

BLOCK = 128


def quantized_words(hidden: int) -> int | None:
    """Width of :func:`quantize_tokens`; None: tokens of ``hidden`` numbers cannot be words."""
    return hidden // 4 + cdiv(hidden, BLOCK) if hidden % 4 == 0 else None


def quantize_tokens(tokens: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Quantises tokens ``[T, hidden]`` as the experts do, with the scales of a token beside its codes: int32
    ``[T, quantized_words(hidden)]``, so that they travel as one row."""
    count, hidden = tokens.shape
    words = torch.empty(count, hidden // 4 + cdiv(hidden, BLOCK), dtype=torch.int32, device=tokens.device)
    codes, scales = codes_and_scales(words, hidden)
    quantize_rows(tokens, BLOCK, power_of_two, codes=codes, scales=scales)
    return words


def codes_and_scales(words: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes ``[T, hidden]`` and scales ``[T, ceil(hidden / 128)]`` of :func:`quantize_tokens`: views."""
    return words[:, : hidden // 4].view(torch.float8_e4m3fn), words[:, hidden // 4 :].view(torch.float32)
