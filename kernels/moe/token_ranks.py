"""The ranks that tokens go to: each token once to every rank that holds some of its experts.

ranks[t, j] = rank_of[topk_ids[t, j]];   first[t, j] = ranks[t, j] where no i < j of the token has it, else −1
counts[r] = (how many first are r: tokens that go there,  how many ranks are r: its pairs)

With several tables of ranks, ranks and first are those of each, and counts[r] has the two numbers of each.

Bits: exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Token-expert pairs of a program, and ranks that they are compared with at a time. Compiled for sm_90, not yet measured
# on a device.
_PAIRS, _RANKS = 256, 16


class TokenRanks(NamedTuple):
    """Everything is on the device; −1: no expert."""

    ranks: torch.Tensor  # [(n,) T, k] int32: the rank of every pair
    first: torch.Tensor  # [(n,) T, k] int32: the same, −1 where an earlier pair of the token has the same rank
    counts: torch.Tensor | None  # [size, 2 (· n)] int32: tokens that go to each rank, and its pairs


def token_ranks_reference(topk_ids: torch.Tensor, rank_of: torch.Tensor, size: int, counted: bool) -> TokenRanks:
    if rank_of.dim() == 2:
        each = [token_ranks_reference(topk_ids, one, size, counted=True) for one in rank_of]
        ranks, first, counts = (torch.stack(parts) for parts in zip(*each, strict=True))
        return TokenRanks(ranks, first, counts.transpose(0, 1).reshape(size, -1) if counted else None)
    k = topk_ids.shape[1]
    ranks = rank_of[topk_ids.long()].masked_fill_(topk_ids < 0, -1)
    earlier = torch.ones(k, k, dtype=torch.bool, device=topk_ids.device).tril(-1)
    again = ((ranks[:, :, None] == ranks[:, None, :]) & earlier).any(dim=-1)
    first = ranks.masked_fill(again, -1)
    if not counted:
        return TokenRanks(ranks, first, None)
    at = torch.stack((first, ranks)).view(2, -1).long() + 1  # pairs without an expert come first
    counts = torch.zeros(2, size + 1, dtype=torch.int32, device=topk_ids.device)
    counts.scatter_add_(1, at, counts.new_ones(()).expand_as(at))
    return TokenRanks(ranks, first, counts[:, 1:].t().contiguous())


@triton.jit
def _rank(topk_ids, rank_of, token, column, known, stride):
    expert = tl.load(topk_ids + token * stride + column, mask=known, other=-1)
    return tl.load(rank_of + expert, mask=expert >= 0, other=-1)


@kernel(do_not_specialize=["tokens", "size", "experts"])
def token_ranks_kernel(
    topk_ids, rank_of, ranks, first, counts, tokens, size, expert_stride, experts,
    K: tl.constexpr, TOKENS: tl.constexpr, K_PAD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens and a table a program. Counts add up as whole numbers, the same in any order."""
    table = tl.program_id(1).to(tl.int64)
    rank_of += table * experts
    ranks += table * tokens * K
    first += table * tokens * K
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, K_PAD)[None, :]
    known = (token < tokens) & (column < K)
    rank = _rank(topk_ids, rank_of, token, column, known, expert_stride)
    again = tl.zeros((TOKENS, K_PAD), tl.int1)
    for i in tl.static_range(K - 1):
        again |= (_rank(topk_ids, rank_of, token, i, token < tokens, expert_stride) == rank) & (column > i)
    once = tl.where(again, -1, rank)
    tl.store(ranks + token * K + column, rank, mask=known)
    tl.store(first + token * K + column, once, mask=known)
    if counts is not None:
        counts += 2 * table
        width = 2 * tl.num_programs(1)
        goes, pair_ranks = tl.reshape(once, (TOKENS * K_PAD,)), tl.reshape(rank, (TOKENS * K_PAD,))
        for from_rank in range(0, size, RANKS):
            number = from_rank + tl.arange(0, RANKS)
            rows = tl.sum((goes[:, None] == number[None, :]).to(tl.int32), axis=0)
            pairs = tl.sum((pair_ranks[:, None] == number[None, :]).to(tl.int32), axis=0)
            tl.atomic_add(counts + width * number, rows, mask=(number < size) & (rows > 0))
            tl.atomic_add(counts + width * number + 1, pairs, mask=(number < size) & (pairs > 0))


@operation()
def token_ranks(topk_ids: torch.Tensor, rank_of: torch.Tensor, size: int, counted: bool = True) -> TokenRanks:
    """Finds the ranks that the tokens of a dispatch go to, with no synchronisation of host and device.

    Args:
        topk_ids: int32 ``[T, k]``, experts of all ranks; −1: no expert.
        rank_of: int32 ``[experts]``: the rank of each; or n such tables, ``[n, experts]``.
        size: number of ranks.
        counted: whether there are counts.
    """
    if (
        topk_ids.dim() != 2
        or rank_of.dim() not in (1, 2)
        or topk_ids.dtype != torch.int32
        or rank_of.dtype != torch.int32
    ):
        raise ValueError(
            "topk_ids must be int32 [tokens, k] and rank_of int32 [experts] or [n, experts], not "
            f"{topk_ids.dtype} {tuple(topk_ids.shape)} and {rank_of.dtype} {tuple(rank_of.shape)}"
        )
    if size < 1:
        raise ValueError(f"tokens go to 1 rank or more, not to {size}")
    if not runs_triton(topk_ids):
        return token_ranks_reference(topk_ids, rank_of, size, counted)
    (tokens, k), device, tables = topk_ids.shape, topk_ids.device, rank_of.shape[:-1]
    ranks = torch.empty(*tables, tokens, k, dtype=torch.int32, device=device)
    first, each = torch.empty_like(ranks), tables.numel()
    counts = torch.zeros(size, 2 * each, dtype=torch.int32, device=device) if counted else None
    if topk_ids.numel():
        topk_ids = topk_ids if topk_ids.stride(1) == 1 else topk_ids.contiguous()
        padded = next_power_of_2(k)
        at_once = max(1, _PAIRS // padded)
        token_ranks_kernel[(cdiv(tokens, at_once), each)](
            topk_ids, rank_of.contiguous(), ranks, first, counts, tokens, size, topk_ids.stride(0), rank_of.shape[-1],
            K=k, TOKENS=at_once, K_PAD=padded, RANKS=min(_RANKS, next_power_of_2(size)), num_warps=4,
        )  # fmt: skip
    return TokenRanks(ranks, first, counts)
