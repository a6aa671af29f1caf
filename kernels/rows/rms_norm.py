"""RMSNorm; the kernel also adds the residual before it (`add_rms_norm.py`).

y = weight * x / sqrt(mean(x²) + eps)        statistics in float32 over the last dimension

Where FP8 products take y it is quantised in the same pass, to the bits of `formats/quantize.py`.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl

from dsa_engine.kernels.formats.quantize import BLOCK, fill_words, numbers_beside, store_codes, words_for_kernel
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


@kernel
def rms_norm_kernel(
    x, also, residual, weight, normed, summed, codes, scales, words, x_stride, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """One row a program, held in registers. With ADD, ``x + also + residual`` is stored and then normalised; there may
    be no ``also``, and no ``codes`` and ``scales``, whose rows are of so many ``words``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        if also is not None:  # rounded before the residual is added, as in a separate addition
            values = (values + tl.load(also + row * width + columns, mask=inside, other=0.0)).to(x.dtype.element_ty)
        values = values + tl.load(residual + row * width + columns, mask=inside, other=0.0)
        tl.store(summed + row * width + columns, values, mask=inside)
    full = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full) / width + eps)
    # Rounded before the weight as well, as the model's definition does.
    result = tl.load(weight + columns, mask=inside, other=0.0) * (full * scale).to(values.dtype)
    rounded = result.to(normed.dtype.element_ty)
    tl.store(normed + row * width + columns, rounded, mask=inside)
    if codes is not None:
        at, scale_at = codes + row * words * 4, scales + row * words
        store_codes(rounded.to(tl.float32), at, scale_at, 0, width, BLOCK, POWER_OF_TWO, CONVERTS)


def run_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    also: torch.Tensor | None,
    words: torch.Tensor | None,
    power_of_two: bool,
    *,
    native: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, width]`` with any row stride; the sum is x itself where there is no residual. ``native``: runs
    ``cpu/rows.cpp``, else the Triton kernel."""
    rows, width = x.shape
    normed = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    if native:
        cpu.kernels().dsa_rms_norm(
            x.data_ptr(), None if also is None else also.data_ptr(), None if residual is None else residual.data_ptr(),
            weight.data_ptr(), normed.data_ptr(), summed.data_ptr(), cpu.TYPES[x.dtype], rows, width, x.stride(0), eps,
            cpu.row_threads(rows * width),
        )  # fmt: skip
        fill_words(normed, words, power_of_two)
    elif rows:
        block = max(next_power_of_2(width), 1 if words is None else BLOCK)
        # 8 elements, one 16-byte load, a thread at least, and at most 16 warps: 7168 columns take 16 a thread.
        warps = min(16, max(1, block // 256))
        rms_norm_kernel[(rows,)](
            x, also, residual, weight, normed, summed, *words_for_kernel(words, width), x.stride(0), width, eps,
            ADD=residual is not None, BLOCK=block, POWER_OF_TWO=power_of_two, CONVERTS=chip_of(x).converts_e4m3,
            num_warps=warps,
        )  # fmt: skip
    return normed, summed


@operation(runs=cpu.runs_kernel, writes=("words",), decoded=numbers_beside)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, words: torch.Tensor | None = None, power_of_two: bool = False
) -> torch.Tensor:
    """Normalises ``x [..., width]`` and scales it by ``weight [width]``; the result has the dtype of ``x``.

    ``words``: filled with what :func:`.quantize.quantize_tokens` makes of the result, a matrix; contiguous.
    """
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x has width {x.shape[-1]}, the weight has {weight.shape[0]}")
    native = cpu.serves(x, weight)
    if not native and not runs_triton(x):
        normed = rms_norm_reference(x, weight, eps)
        fill_words(normed, words, power_of_two)
        return normed
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    return run_rms_norm(rows, None, weight.contiguous(), eps, None, words, power_of_two, native=native)[0].view(x.shape)
