"""RMSNorm; the kernel also adds the residual before it (`add_rms_norm.py`).

y = weight * x / sqrt(mean(x²) + eps)        statistics in float32 over the last dimension

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


@kernel
def rms_norm_kernel(
    x, also, residual, weight, normed, summed, x_stride, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program, held in registers. With ADD, ``x + also + residual`` is stored and then normalised; there may
    be no ``also``."""
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
    tl.store(normed + row * width + columns, result.to(normed.dtype.element_ty), mask=inside)


def run_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    also: torch.Tensor | None = None,
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
    elif rows:
        block = next_power_of_2(width)
        # 8 elements, one 16-byte load, a thread at least, and at most 16 warps: 7168 columns take 16 a thread.
        warps = min(16, max(1, block // 256))
        rms_norm_kernel[(rows,)](
            x, also, residual, weight, normed, summed, x.stride(0), width, eps,
            ADD=residual is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return normed, summed


@operation(runs=cpu.runs_kernel)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises ``x [..., width]`` and scales it by ``weight [width]``; the result has the dtype of ``x``."""
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x has width {x.shape[-1]}, the weight has {weight.shape[0]}")
    native = cpu.serves(x, weight)
    if not native and not runs_triton(x):
        return rms_norm_reference(x, weight, eps)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    return run_rms_norm(rows, None, weight.contiguous(), eps, native=native)[0].view(x.shape)
