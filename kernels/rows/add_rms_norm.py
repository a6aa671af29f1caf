"""The residual addition of a decoder layer, and the RMSNorm after it, in one pass.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.quantize import fill_words, numbers_beside
from dsa_engine.kernels.rows.rms_norm import rms_norm_reference, run_rms_norm
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


@operation(runs=cpu.runs_kernel, writes=("words",), decoded=numbers_beside)
def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    also: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, and its RMSNorm: returns ``(normed, summed)``, both ``[T, width]``.

    ``also [T, width]`` is added to x first, and that sum is rounded. ``words``: as of :func:`.rms_norm.rms_norm`.
    """
    if x.shape != residual.shape or x.shape[-1] != weight.shape[0] or (also is not None and also.shape != x.shape):
        second = "" if also is None else f" + {tuple(also.shape)}"
        raise ValueError(
            f"x {tuple(x.shape)}{second}, residual {tuple(residual.shape)} and weight {tuple(weight.shape)} do not fit "
            "together"
        )
    native = cpu.serves(x, residual, weight, x if also is None else also)
    if not native and not runs_triton(x):
        summed = residual + (x if also is None else x + also)
        normed = rms_norm_reference(summed, weight, eps)
        fill_words(normed, words, power_of_two)
        return normed, summed
    given = x.contiguous(), residual.contiguous(), weight.contiguous(), eps, None if also is None else also.contiguous()
    return run_rms_norm(*given, words, power_of_two, native=native)
