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

from dsa_engine.kernels.formats.quantize import BLOCK as CODED
from dsa_engine.kernels.formats.quantize import fill_words, numbers_beside, store_codes, words_for_kernel
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@kernel
def silu_mul_kernel(
    gate_up, out, codes, scales, words, stride, width,
    BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, rounded, mask=inside)
    if codes is not None:
        at, scale_at, first = codes + row * words * 4, scales + row * words, tl.program_id(1) * BLOCK
        store_codes(rounded.to(tl.float32), at, scale_at, first, width, BLOCK, POWER_OF_TWO, CONVERTS)


@operation(runs=cpu.runs_kernel, writes=("words",), decoded=numbers_beside)
def silu_mul(gate_up: torch.Tensor, words: torch.Tensor | None = None, power_of_two: bool = False) -> torch.Tensor:
    """``[..., 2·width]`` (gate, then up) to ``[..., width]``; ``words``: as of :func:`.rms_norm.rms_norm`."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even width, not {gate_up.shape[-1]}")
    native = cpu.serves(gate_up)
    if not native and not runs_triton(gate_up):
        made = silu_mul_reference(gate_up)
        fill_words(made, words, power_of_two)
        return made
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
        fill_words(out, words, power_of_two)
    elif out.numel():
        # 8 elements, 16 bytes of each half, a thread.
        block = max(min(1024, next_power_of_2(width)), 1 if words is None else CODED)
        warps = max(1, block // 256)
        silu_mul_kernel[(rows.shape[0], cdiv(width, block))](
            rows, out, *words_for_kernel(words, width), rows.stride(0), width, BLOCK=block,
            POWER_OF_TWO=power_of_two, CONVERTS=chip_of(rows).converts_e4m3, num_warps=warps,
        )  # fmt: skip
    return out.view(*gate_up.shape[:-1], width)
