"""The ranks that tokens go to: each token once to every rank that holds some of its experts, in one row.

ranks[t, j] = rank_of[topk_ids[t, j]];   a pair is first where no i < j of its token has the same rank
counts[r] = (how many first pairs have rank r: tokens that go there,  how many pairs have it)

First pairs have rows, sorted by rank and, within one, by token, as in :mod:`.expert_order`. With several tables of
ranks, counts[r] has the two numbers of each, and all else is of the last.

Bits: exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsa_engine.kernels.moe.expert_order import Order, expert_order_reference, order_by_tokens
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


class TokenRanks(NamedTuple):
    """Everything is on the device."""

    tokens: torch.Tensor  # [T · k] int32: the token of every row; those of first pairs are first
    row_ends: torch.Tensor  # [size] int32: the index after each rank's last row
    pair_rows: torch.Tensor  # [T, k] int32: the row of every first pair, −1 of others
    ranks: torch.Tensor  # [T, k] int32: the rank of every pair; −1: no expert
    counts: torch.Tensor | None  # [size, 2 (· n)] int32: tokens that go to each rank, and its pairs


def token_ranks_reference(topk_ids: torch.Tensor, rank_of: torch.Tensor, size: int, counted: bool) -> TokenRanks:
    k, counts = topk_ids.shape[1], []
    earlier = torch.ones(k, k, dtype=torch.bool, device=topk_ids.device).tril(-1)
    for table in rank_of if counted else rank_of[-1:]:
        ranks = table[topk_ids.long()].masked_fill_(topk_ids < 0, -1)
        again = ((ranks[:, :, None] == ranks[:, None, :]) & earlier).any(dim=-1)
        first = ranks.masked_fill(again, -1)
        if counted:
            at = torch.stack((first, ranks)).view(2, -1).long() + 1  # pairs without an expert come first
            each = torch.zeros(2, size + 1, dtype=torch.int32, device=topk_ids.device)
            counts.append(each.scatter_add_(1, at, each.new_ones(()).expand_as(at))[:, 1:])
    order = expert_order_reference(first, size)
    return TokenRanks(*order, ranks, torch.cat(counts).t().contiguous() if counted else None)


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
    tables = rank_of if rank_of.dim() == 2 else rank_of[None]
    if not runs_triton(topk_ids) or not topk_ids.numel():
        return token_ranks_reference(topk_ids, tables, size, counted)
    topk_ids = topk_ids if topk_ids.stride(1) == 1 else topk_ids.contiguous()
    tokens, row_ends = topk_ids.new_empty(topk_ids.numel()), topk_ids.new_empty(size)
    pair_rows, ranks = topk_ids.new_empty(topk_ids.shape), topk_ids.new_empty(topk_ids.shape)
    counts = topk_ids.new_empty(size, 2 * len(tables)) if counted else None
    order_by_tokens(topk_ids, Order(tokens, row_ends, pair_rows), 0, tables.contiguous(), ranks, counts)
    return TokenRanks(tokens, row_ends, pair_rows, ranks, counts)
