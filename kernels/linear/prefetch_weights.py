"""Prefetch of weights from the device's memory into its L2 cache, beside other work.

Products of few rows take as long as their weights take to arrive. While a step waits for another device, a few
programs ask for the weights that it reads next, by ``prefetch.global.L2`` of PTX, a line of 128 bytes each. The
instruction gives no result and is not waited for, so nothing changes but the time of the next reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import l2_bytes, runs_on_chip

_LINE = 128  # bytes

# Few programs, as the collective beside them needs multiprocessors too: 16 of 132, each with 4 lines a thread at a
# time. Compiled for sm_90, not yet measured.
_PROGRAMS, _LINES, _WARPS = 16, 512, 4

# The part of L2 that weights may take. Hopper's L2 has two halves, and each keeps lines for the multiprocessors on its
# side, so lines that all of them read may lie there twice.
_PART = 2


@triton.jit
def prefetch_weights_kernel(
    weights, LINES: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """The first ``LINES[i]`` lines of each of ``weights``; the programs take blocks in turn."""
    block = tl.program_id(0)
    for i in tl.static_range(len(weights)):
        first = weights[i].to(tl.int64)
        for start in range(block * BLOCK, LINES[i], PROGRAMS * BLOCK):
            line = tl.minimum(start + tl.arange(0, BLOCK), LINES[i] - 1)  # the last one may be asked for again
            # The result is not used; an instruction that is not pure stays.
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [first + line.to(tl.int64) * LINE],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


def prefetch_weights(weights: Sequence[torch.Tensor]) -> int:
    """Asks for weights, in their order, up to half of what the L2 cache holds; the rest is left out. A CUDA graph may
    contain it, which then asks for the same memory again each time.

    Args:
        weights: contiguous tensors on one device, of any dtype. On a CPU, in the interpreter, and where references run,
            nothing is done.

    Returns:
        the number of bytes.
    """
    if not weights or not runs_on_chip(weights[0]):
        return 0
    lines = prefetched_lines([weight.nbytes for weight in weights], l2_bytes(weights[0]))
    if not lines:
        return 0
    in_bytes = tuple(weight.view(torch.uint8) for weight in weights[: len(lines)])
    prefetch_weights_kernel[(_PROGRAMS,)](
        in_bytes, LINES=lines, PROGRAMS=_PROGRAMS, BLOCK=_LINES, LINE=_LINE, num_warps=_WARPS
    )
    return sum(lines) * _LINE


def prefetched_lines(sizes: Iterable[int], l2: int) -> tuple[int, ...]:
    """Number of lines of each tensor, of the first ones that half of ``l2`` bytes holds. The last may be cut.

    Args:
        sizes: bytes of each.
    """
    room, lines = l2 // _PART // _LINE, []
    for size in sizes:
        if not room:
            break
        lines.append(min(room, cdiv(size, _LINE)))
        room -= lines[-1]
    return tuple(lines)
