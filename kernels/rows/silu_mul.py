"""The gate of a SwiGLU feed-forward layer, with gate and up side by side in one matrix.

y = silu(gate) · up,   silu(a) = a / (1 + exp(−a))

The kernel works in float32 and rounds once. On a CPU silu(gate) is rounded too, as PyTorch does it: for half types that
is 6 times as fast as going through float32.

Bits of a row: they depend on that row alone, but on a CPU in half types on its place too: PyTorch's function rounds
the last numbers of a tensor in another way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@kernel
def silu_mul_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@operation(runs=cpu.runs_kernel)
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``[..., 2·width]`` (gate, then up) to ``[..., width]``."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even width, not {gate_up.shape[-1]}")
    native = cpu.serves(gate_up)
    if not native and not runs_triton(gate_up):
        return silu_mul_reference(gate_up)
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(gate_up.shape[:-1].numel(), 2 * width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    if native:
        threads = cpu.row_threads(out.numel())
        cpu.kernels().dsa_silu_mul(
            rows.data_ptr(), out.data_ptr(), cpu.TYPES[out.dtype], *out.shape, rows.stride(0), threads
        )
    elif out.numel():
        # 8 elements, 16 bytes of each half, a thread.
        block = min(1024, next_power_of_2(width))
        warps = max(1, block // 256)
        silu_mul_kernel[(rows.shape[0], cdiv(width, block))](
            rows, out, rows.stride(0), width, BLOCK=block, num_warps=warps
        )
    return out.view(*gate_up.shape[:-1], width)
