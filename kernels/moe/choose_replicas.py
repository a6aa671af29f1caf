"""The physical experts of routed tokens, whose ``topk_ids`` are logical ones.

turn(t) = frac((first + t) · √2);   physical[t, j] = replica ⌊turn(t) · n⌋ of the n replicas of topk_ids[t, j]

Multiples of √2 divide any run of consecutive rows evenly, and every second or third of them too.

Bits: exact. Which replica works on a token follows from its row, and replicas are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_PAIRS = 1024  # a program
_ROOT = tl.constexpr(0x6A09E667)  # 2³² · frac(√2); the product of 32-bit numbers keeps the fraction


class Replicas(NamedTuple):
    """What chooses replicas, see :func:`choose_replicas`."""

    table: torch.Tensor  # int32 [experts, 1 + n]
    first: int


def choose_replicas_reference(topk_ids: torch.Tensor, replicas: torch.Tensor, first: int) -> torch.Tensor:
    row = torch.arange(first, first + len(topk_ids), device=topk_ids.device)
    turn = (row * _ROOT.value & 0xFFFFFFFF) >> 16
    entries = replicas[topk_ids.long()]  # an entry for expert −1 too
    number = 1 + (turn[:, None] * entries[..., 0] >> 16)
    return entries.gather(2, number[..., None])[..., 0].masked_fill_(topk_ids < 0, -1)


@triton.jit
def physical_expert(expert, row, replicas, WIDTH: tl.constexpr):
    """The replica of ``expert`` that computes row ``row``; −1 stays."""
    turn = ((row.to(tl.uint32) * tl.full((), _ROOT, tl.uint32)) >> 16).to(tl.int32)
    among = tl.load(replicas + expert * WIDTH, mask=expert >= 0, other=1)
    number = 1 + ((turn * among) >> 16)
    return tl.load(replicas + expert * WIDTH + number, mask=expert >= 0, other=-1)


@kernel(do_not_specialize=["count", "first"])
def choose_replicas_kernel(
    topk_ids, replicas, physical, count, first, WIDTH: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK token-expert pairs a program."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(topk_ids + pair, mask=pair < count, other=-1)
    chosen = physical_expert(expert, first + pair // K, replicas, WIDTH)
    tl.store(physical + pair, chosen, mask=pair < count)


@operation()
def choose_replicas(topk_ids: torch.Tensor, replicas: torch.Tensor, first: int) -> torch.Tensor:
    """Chooses a replica for every token-expert pair, evenly and each time the same.

    Args:
        topk_ids: logical experts, int32 ``[T, k]``; −1: no expert.
        replicas: int32 ``[experts, 1 + n]``, on the device; for each logical expert the number of its replicas, at
            least 1, and these. It may be changed between runs of a CUDA graph.
        first: number of the first row. Ranks begin with different ones, so that few rows of many ranks divide evenly.

    Returns:
        physical experts, int32 ``[T, k]``; −1 stays.
    """
    shapes = topk_ids.dim() == replicas.dim() == 2 and replicas.shape[1] > 1
    if not shapes or topk_ids.dtype != torch.int32 or replicas.dtype != torch.int32:
        raise ValueError(
            "topk_ids must be int32 [tokens, k] and replicas int32 [experts, 1 + n], not "
            f"{topk_ids.dtype} {tuple(topk_ids.shape)} and {replicas.dtype} {tuple(replicas.shape)}"
        )
    if not runs_triton(topk_ids):
        return choose_replicas_reference(topk_ids, replicas, first)
    topk_ids = topk_ids.contiguous()
    physical, count = torch.empty_like(topk_ids), topk_ids.numel()
    if count:
        choose_replicas_kernel[(cdiv(count, _PAIRS),)](
            topk_ids, replicas.contiguous(), physical, count, first,
            WIDTH=replicas.shape[1], K=topk_ids.shape[1], BLOCK=_PAIRS, num_warps=4,
        )  # fmt: skip
    return physical
