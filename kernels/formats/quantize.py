"""1×block quantisation of activations to e4m3, for block-scaled FP8 products and FP8 caches.

    scale = max(1e-4, max |x|) · (1/448)     of each run of ``block`` values; on demand rounded up to a power of two
    value = e4m3(x / scale)                  rounded to nearest, ties to even

DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3; floor and product, in float32, as in the code that was
released with V3.2-Exp. Dividing by 448 instead gives the same powers of two; of other scales more than half differ in
the last bit, and of the codes of random bfloat16 numbers 0.12% do. Inputs are finite.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import SMALLEST_AMAX, quantize_tile
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

FP8 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(FP8).max  # 448

# Values a program, 32 a thread: 4 loads of 16 bytes in flight hide the latency of memory; nothing else to choose.
_TILE, _WARPS = 4096, 4

BLOCK = 128  # tokens as words
_BLOCK = tl.constexpr(BLOCK)


def scales_of(largest: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Scales of blocks of a weight whose largest magnitudes are ``largest``, float32: these come to the end of e4m3's
    range."""
    # The floor keeps a block of zeros, or of the smallest floats, from dividing by zero.
    scales = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return _rounded_up(scales) if power_of_two else scales


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """The next powers of two."""
    mantissa, exponent = torch.frexp(scales)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scales), torch.where(mantissa > 0.5, exponent, exponent - 1))


def quantize_rows_reference(values: torch.Tensor, block: int, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = values.shape[-1]
    blocks = F.pad(values.float(), (0, -width % block)).unflatten(-1, (-1, block))
    scales = blocks.abs().amax(dim=-1).clamp_min(SMALLEST_AMAX).mul_(1 / E4M3_MAX)
    if power_of_two:
        scales = _rounded_up(scales)
    # A rounded scale may lift a value over the end of the range; e4m3 has no infinity to catch it.
    scaled = (blocks / scales[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2)[..., :width].contiguous(), scales


@kernel(do_not_specialize=["count"])
def quantize_rows_kernel(
    x, codes, scales, count, x_stride, code_stride, scale_stride,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """BLOCKS of all ``count`` blocks a program; the last block of a row may be narrower than SIZE."""
    block = (tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    known = block < count
    per_row: tl.constexpr = (WIDTH + SIZE - 1) // SIZE
    row, column = block // per_row, block % per_row * SIZE + tl.arange(0, SIZE)[None, :]
    inside = known
    if WIDTH % SIZE != 0:
        inside &= column < WIDTH
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    code, scale = quantize_tile(values.to(tl.float32), POWER_OF_TWO, CONVERTS)
    tl.store(codes + row * code_stride + column, code, mask=inside)
    tl.store(scales + row * scale_stride + block % per_row, scale, mask=known)


@triton.jit
def store_codes(
    values, codes, scales, first, width, COUNT: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr
):
    """Quantises ``values [COUNT]``, float32, 1 × 128, for a kernel that has just made them: they are those from column
    ``first`` on of a row of ``width``, where ``codes`` and ``scales`` begin; zeros beyond it."""
    block = tl.arange(0, COUNT // _BLOCK)[:, None]
    column = first + block * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    code, scale = quantize_tile(tl.reshape(values, (COUNT // _BLOCK, _BLOCK)), POWER_OF_TWO, CONVERTS)
    tl.store(codes + column, code, mask=column < width)
    tl.store(scales + first // _BLOCK + block, scale, mask=first + block * _BLOCK < width)


def _numbers(given: dict[str, Any], result: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor] | None:
    if result is None:  # before the call there are none
        return None
    codes, scales = result
    return [codes.float() * scales.repeat_interleave(given["block"], dim=-1)[..., : codes.shape[-1]]]


@operation(writes=("codes", "scales"), decoded=_numbers)
def quantize_rows(
    values: torch.Tensor,
    block: int = 128,
    power_of_two: bool = False,
    *,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``values [..., width]``, each run of ``block`` values by its own scale.

    Args:
        values: bfloat16, float16 or float32; the last dimension contiguous.
        block: a power of two. Where it does not divide the width, the last block of a row is narrower.
        power_of_two: round scales up to powers of two (``scale_fmt: ue8m0`` in released configurations).
        codes, scales: memory for the results of a matrix ``values``, the elements of a row side by side; default: new.

    Returns:
        float8_e4m3fn, shaped like ``values``, and float32 scales ``[..., ceil(width / block)]``; contiguous where new.
    """
    width = values.shape[-1]
    if block < 1 or block & (block - 1):
        raise ValueError(f"the block must be a power of two, not {block}")
    shape = (*values.shape[:-1], cdiv(width, block))
    if (codes is None) != (scales is None):
        raise ValueError("codes and scales are given both or neither")
    if codes is not None and scales is not None and (codes.shape, scales.shape) != (values.shape, shape):
        raise ValueError(f"codes {list(codes.shape)} and scales {list(scales.shape)} do not fit {list(values.shape)}")
    if not runs_triton(values):
        made = quantize_rows_reference(values, block, power_of_two)
        if codes is None or scales is None:
            return made
        return codes.copy_(made[0]), scales.copy_(made[1])
    if codes is None or scales is None:
        codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
        scales = torch.empty(shape, dtype=torch.float32, device=values.device)
        strides = width, shape[-1]
    else:
        strides = codes.stride(0), scales.stride(0)
    rows = values if values.dim() == 2 and values.stride(1) == 1 else values.contiguous().view(-1, width)
    if count := scales.numel():
        blocks = max(1, _TILE // block)
        quantize_rows_kernel[(cdiv(count, blocks),)](
            rows, codes.view(torch.uint8), scales, count, rows.stride(0), *strides,
            WIDTH=width, SIZE=block, BLOCKS=blocks,
            POWER_OF_TWO=power_of_two, CONVERTS=chip_of(values).converts_e4m3, num_warps=_WARPS,
        )  # fmt: skip
    return codes, scales


def quantized_words(hidden: int) -> int | None:
    """Width of :func:`quantize_tokens`; None: tokens of ``hidden`` numbers cannot be words."""
    return hidden // 4 + cdiv(hidden, BLOCK) if hidden % 4 == 0 else None


def quantize_tokens(tokens: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Quantises tokens ``[T, hidden]`` as the experts do, with the scales of a token beside its codes: int32
    ``[T, quantized_words(hidden)]``, so that they travel as one row."""
    count, hidden = tokens.shape
    words = torch.empty(count, hidden // 4 + cdiv(hidden, BLOCK), dtype=torch.int32, device=tokens.device)
    fill_words(tokens, words, power_of_two)
    return words


def fill_words(tokens: torch.Tensor, words: torch.Tensor | None, power_of_two: bool) -> None:
    """:func:`quantize_tokens` into ``words``, if there are any."""
    if words is not None:
        codes, scales = codes_and_scales(words, tokens.shape[1])
        quantize_rows(tokens, BLOCK, power_of_two, codes=codes, scales=scales)


def words_for_kernel(words: torch.Tensor | None, hidden: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """What a kernel with :func:`store_codes` takes of ``words``: codes as bytes, scales, words of a row."""
    if words is None:
        return None, None, 0
    codes, scales = codes_and_scales(words, hidden)
    return codes.view(torch.uint8), scales, words.shape[1]


def numbers_beside(given: dict[str, Any], result: Any) -> list[torch.Tensor] | None:
    """What is compared of an operation that also fills ``words`` with its (first) result."""
    if given.get("words") is None or result is None:
        return None
    results = [*result] if isinstance(result, tuple) else [result]
    made = codes_and_scales(given["words"], results[0].shape[1])
    return [*results, *(_numbers({"block": BLOCK}, made) or ())]


def codes_and_scales(words: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes ``[T, hidden]`` and scales ``[T, ceil(hidden / 128)]`` of :func:`quantize_tokens`: views."""
    return words[:, : hidden // 4].view(torch.float8_e4m3fn), words[:, hidden // 4 :].view(torch.float32)
