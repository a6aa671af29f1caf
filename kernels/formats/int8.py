"""INT8 with one scale a row: weights by output channel, activations by token.

    scale = max |x| / 127     of each row, float32
    code  = round(x / scale)  to nearest, ties to even; −127 … 127

SmoothQuant (arXiv 2211.10438), section 2: per-channel weights and dynamic per-token activations. Inputs are finite.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.division import divide
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

INT8_MAX = 127

# Largest number of values of a row that a program holds at once; longer rows are read twice.
_LONGEST = 16384


def int8_scales(largest: torch.Tensor) -> torch.Tensor:
    """Float32 scales of rows whose largest magnitudes are ``largest``."""
    # The floor keeps a row of zeros, or of the smallest floats, from dividing by zero.
    return (largest.float() / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)


def quantize_rows_int8_reference(
    values: torch.Tensor, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = values.float()
    scales = int8_scales(values.abs().amax(dim=-1) if largest is None else largest)
    codes = (values / scales[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scales


@triton.jit
def nearest_int8(x):
    """The integer nearest to x, ties to even, as int8; |x| is at most 127, or is cut to it."""
    # Beside 1.5 · 2^23 the steps of float32 are 1: the addition rounds.
    rounded = tl.where(x == x, (x + 12582912.0) - 12582912.0, 0.0)  # NaN: rows that no expert here serves
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)


@kernel
def quantize_rows_int8_kernel(
    x, largest, codes, scales, width, x_stride, code_steps, scale_stride,
    GIVEN: tl.constexpr, WHOLE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program. GIVEN: its largest magnitude is read, not computed. WHOLE: BLOCK is not shorter than the row.
    Rows of codes are ``code_steps`` times STEP bytes apart."""
    row = tl.program_id(0).to(tl.int64)
    code_row = codes + row * code_steps * STEP
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    if GIVEN:
        maximum = tl.load(largest + row)
    else:
        magnitude = tl.abs(values)
        if not WHOLE:
            for first in range(BLOCK, width, BLOCK):
                more = tl.load(x + row * x_stride + first + column, mask=first + column < width, other=0.0)
                magnitude = tl.maximum(magnitude, tl.abs(more.to(tl.float32)))
        maximum = tl.max(magnitude)
    # True divisions, as codes and scales are those of the reference.
    scale = tl.maximum(tl.div_rn(maximum, 127.0), 1.1754943508222875e-38)
    tl.store(scales + row * scale_stride, scale)
    tl.store(code_row + column, nearest_int8(divide(values, scale)), mask=column < width)
    if not WHOLE:
        for first in range(BLOCK, width, BLOCK):
            inside = first + column < width
            more = tl.load(x + row * x_stride + first + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(code_row + first + column, nearest_int8(divide(more, scale)), mask=inside)


def _numbers(given: dict[str, Any], result: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor] | None:
    if result is None:  # before the call there are none
        return None
    codes, scales = result
    return [codes.float() * scales[:, None]]


@operation(writes=("codes", "scales"), decoded=_numbers)
def quantize_rows_int8(
    values: torch.Tensor,
    largest: torch.Tensor | None = None,
    *,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises each row of ``values [rows, width]`` by its own scale.

    Args:
        values: bfloat16, float16 or float32.
        largest: float32 ``[rows]``, the largest magnitude of each row, for rows of which ``values`` holds only some
            columns; found in ``values`` if not given.
        codes, scales: memory for the results, the codes of a row side by side; default: new.

    Returns:
        int8 ``[rows, width]`` and float32 scales ``[rows]``; contiguous where new.
    """
    if values.dim() != 2 or (largest is not None and largest.shape != values.shape[:1]):
        given = "" if largest is None else f" and largest {list(largest.shape)}"
        raise ValueError(f"values must be [rows, width], largest [rows], not {list(values.shape)}{given}")
    if not runs_triton(values):
        made = quantize_rows_int8_reference(values, largest)
        return made if codes is None or scales is None else (codes.copy_(made[0]), scales.copy_(made[1]))
    rows, width = values.shape
    if codes is None or scales is None:
        codes = torch.empty(rows, width, dtype=torch.int8, device=values.device)
        scales = torch.empty(rows, dtype=torch.float32, device=values.device)
    if codes.numel():
        values = values if values.stride(1) == 1 else values.contiguous()
        # 16 to 32 values a thread.
        block = min(_LONGEST, next_power_of_2(width))
        step = 4 if codes.stride(0) % 4 == 0 else 1  # that the compiler knows: it stores words
        quantize_rows_int8_kernel[(rows,)](
            values, scales if largest is None else largest.float().contiguous(), codes, scales, width,
            values.stride(0), codes.stride(0) // step, scales.stride(0), GIVEN=largest is not None,
            WHOLE=block >= width, STEP=step, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return codes, scales


def int8_words(tokens: torch.Tensor) -> torch.Tensor:
    """Quantises tokens ``[T, hidden]`` as the experts do, with the scale of a token after its codes: int32
    ``[T, hidden / 4 + 1]``, so that they travel as one row. Tokens that are not whole words stay as they are."""
    count, hidden = tokens.shape
    if hidden % 4:
        return tokens
    words = torch.empty(count, hidden // 4 + 1, dtype=torch.int32, device=tokens.device)
    codes, scales = codes_and_scale(words)
    quantize_rows_int8(tokens, codes=codes, scales=scales)
    return words


def codes_and_scale(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes ``[T, hidden]`` and scales ``[T]`` of :func:`int8_words`: views."""
    return words[:, :-1].view(torch.int8), words[:, -1].view(torch.float32)
