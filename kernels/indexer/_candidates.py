"""Candidates: the best tokens that one rank holds, of a request whose pages lie on several (docs/CONTEXT_PARALLEL.md).

    key = order of the score · 2^32 + 2^32 − 1 − position            order: int32, as the float32 scores compare

All keys of a row differ, the greater score wins, and of equal scores the lower position. So the k largest keys among
the k best candidates of every rank are exactly what :func:`.topk.select_topk` selects over all pages: −0 equals +0, NaN
is above everything. Where a rank has fewer candidates, the rest are NONE, the smallest int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NONE = -(2**63)  # the key of no candidate
_NAN = tl.constexpr(0x7F800001)  # the order of NaN
NONE_KEY = tl.constexpr(NONE)


def candidate_keys(
    scores: torch.Tensor, positions: torch.Tensor, page_index: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The keys, int64 ``[R, k]``, of selected scores.

    Args:
        scores: float32 ``[R, W]``.
        positions: int32 ``[R, k]``, columns of them; −1 for no candidate.
        page_index: int32 ``[R, pages]``: number in its request of the page that columns of each row lie on.
    """
    column = positions.clamp(min=0).long()
    score = scores.gather(1, column) + 0.0  # −0 becomes +0
    bits = score.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(score.isnan(), _NAN.value).long()
    at = page_index.gather(1, column // page_size).long() * page_size + column % page_size
    return ((order << 32) | (0xFFFFFFFF - at)).masked_fill_(positions < 0, NONE)


@triton.jit
def score_order(scores):
    """int32 numbers in the order of the scores: −0 and +0 are 0, NaN of either sign is the greatest."""
    bits = scores.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores == scores, tl.where(order == -1, 0, order), _NAN)


@triton.jit
def finish_candidates(
    scores, slots, keys, table, index, count, k, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The end of a selection: the first ``count`` of a row's ``slots [k]`` are positions on this rank and become slots;
    their candidate keys are stored, −1 and NONE after them. ``scores``: the row's; ``table``, ``index``: the pages of
    its sequence, and their numbers in it."""
    tl.debug_barrier()  # the positions are stored
    for first in range(0, k, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        there = entry < count
        position = tl.load(slots + entry, mask=there, other=0)
        order = score_order(tl.load(scores + position, mask=there, other=0.0)).to(tl.int64)
        at = (position.to(tl.uint32) // PAGE_SIZE).to(tl.int32)
        page, number = tl.load(table + at, mask=there, other=0), tl.load(index + at, mask=there, other=0)
        key = (order << 32) | (0xFFFFFFFF - (position + (number - at) * PAGE_SIZE).to(tl.int64))
        tl.store(keys + entry, tl.where(there, key, NONE_KEY), mask=entry < k)
        tl.store(slots + entry, tl.where(there, position + (page - at) * PAGE_SIZE, -1), mask=entry < k)
