"""Token-expert pairs in the order of their experts.

Pair ``t · k + j`` is choice j of token t. Pairs are sorted by expert and, within one, by token; pairs that this rank
does not serve (−1) come last.

    row = pair_rows[t, j]:  tokens[row] = t;   expert e has the rows  row_ends[e − 1] … row_ends[e] − 1
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Largest number of pairs that are ranked by comparing all with all: one launch, but quadratic work. More are
# compared within blocks of so many, whose counts are added up before.
COMPARED_PAIRS, BLOCK_PAIRS = 8192, 256


class Order(NamedTuple):
    """Pairs sorted by expert. Everything is on the device, and the host does not know how many are served."""

    tokens: torch.Tensor  # [T · k] int32: the token of every row; rows of served pairs come first
    row_ends: torch.Tensor  # [experts] int32: the index after each expert's last row; the last: all served pairs
    pair_rows: torch.Tensor  # [T, k] int32: the row of every pair, −1 where it is not served


def local_experts(experts: torch.Tensor, count: int, first: int | None) -> torch.Tensor:
    """The numbers of :func:`expert_order` counted from ``first``, −1 for those that are not served here."""
    if first is None:
        return experts
    local = experts - first
    return local.masked_fill_((local < 0) | (local >= count), -1)


def expert_order_reference(experts: torch.Tensor, count: int, first: int | None = None) -> Order:
    experts = local_experts(experts, count, first)
    pairs = experts.flatten()
    # Two bytes are enough for a number, and are sorted in half the time of four.
    keys = pairs.to(torch.int16).masked_fill_(pairs < 0, count)
    keys, order = keys.sort(stable=True)
    row_ends = torch.searchsorted(
        keys, torch.arange(count, dtype=keys.dtype, device=keys.device), right=True, out_int32=True
    )
    rows = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
    pair_rows = torch.empty_like(rows).scatter_(0, order, rows).masked_fill_(pairs < 0, -1)
    tokens = (order // max(1, experts.shape[1])).int()
    return Order(tokens, row_ends, pair_rows.view(experts.shape))


@triton.jit
def _keys(experts, pair, pairs, count, first, stride, K: tl.constexpr):
    """The expert of each pair, counted from ``first``; ``count`` for pairs that this rank does not serve."""
    expert = tl.load(experts + pair // K * stride + pair % K, mask=pair < pairs, other=-1) - first
    return tl.where((expert >= 0) & (expert < count), expert, count)


@triton.jit(do_not_specialize=["first"])
def order_kernel(
    experts, tokens, row_ends, pair_rows, pairs, count, first, stride,
    K: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ranks by counting. A pair's key is ``expert · pairs + pair``, and its row is the number of smaller keys. The rows
    of expert e end after as many keys as are under ``(e + 1) · pairs``."""
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_pair = query < pairs
    expert = _keys(experts, query, pairs, count, first, stride, K)
    below = tl.where(is_pair, expert * pairs + query, (query - pairs + 1) * pairs)[:, None]
    smaller = tl.zeros((QUERIES, BLOCK), tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        others = _keys(experts, pair, pairs, count, first, stride, K)
        keys = tl.where(pair < pairs, others * pairs + pair, 2147483647)
        smaller += (keys[None, :] < below).to(tl.int32)
    rank = tl.sum(smaller, axis=1)
    tl.store(tokens + rank, query // K, mask=is_pair)
    tl.store(pair_rows + query, tl.where(expert == count, -1, rank), mask=is_pair)
    tl.store(row_ends + (query - pairs), rank, mask=(query >= pairs) & (query < pairs + count))


@triton.jit(do_not_specialize=["pairs", "count", "blocks", "first"])
def order_count_kernel(
    experts, counts, pairs, count, blocks, first, stride, K: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    """A block of pairs a program: the number of them for each expert, ``counts [count + 1, blocks]``."""
    block = tl.program_id(0)
    pair = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.where(pair < pairs, _keys(experts, pair, pairs, count, first, stride, K), -1)
    for start in range(0, count + 1, EXPERTS):
        number = start + tl.arange(0, EXPERTS)
        here = tl.sum((keys[:, None] == number[None, :]).to(tl.int32), axis=0)
        tl.store(counts + number.to(tl.int64) * blocks + block, here, mask=number <= count)


@triton.jit(do_not_specialize=["pairs", "count", "blocks", "first"])
def order_row_kernel(
    experts, upto, tokens, row_ends, pair_rows, pairs, count, blocks, first, stride,
    K: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A block of pairs a program. ``upto [count + 1, blocks]`` has the counts added up, expert by expert and within one
    block by block: a pair's row comes after all that were added up before its block's, and after the pairs of its
    expert that precede it in the block."""
    block = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    pair = block * BLOCK + inside
    known = pair < pairs
    key = _keys(experts, pair, pairs, count, first, stride, K)
    at = key.to(tl.int64) * blocks + block
    row = tl.load(upto + at - 1, mask=known & (at > 0), other=0)
    for start in range(0, BLOCK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        others = _keys(experts, block * BLOCK + column, pairs, count, first, stride, K)
        before = (others[None, :] == key[:, None]) & (column[None, :] < inside[:, None])
        row += tl.sum(before.to(tl.int32), axis=1)
    tl.store(tokens + row, (pair // K).to(tl.int32), mask=known)
    tl.store(pair_rows + pair, tl.where(key == count, -1, row), mask=known)
    if block == 0:
        for start in range(0, count, EXPERTS):
            number = start + tl.arange(0, EXPERTS)
            end = tl.load(upto + (number.to(tl.int64) + 1) * blocks - 1, mask=number < count, other=0)
            tl.store(row_ends + number, end, mask=number < count)


def _order_by_blocks(experts: torch.Tensor, order: Order, first: int) -> None:
    """Fills ``order`` by a counting sort. Compiled for sm_90, not yet measured on a device."""
    pairs, count, blocks = experts.numel(), len(order.row_ends), cdiv(experts.numel(), BLOCK_PAIRS)
    stride, k = experts.stride(0), experts.shape[1]
    counts = torch.empty(count + 1, blocks, dtype=torch.int32, device=experts.device)
    order_count_kernel[(blocks,)](
        experts, counts, pairs, count, blocks, first, stride,
        K=k, BLOCK=BLOCK_PAIRS, EXPERTS=min(32, next_power_of_2(count + 1)), num_warps=4,
    )  # fmt: skip
    upto = counts.view(-1).cumsum(0, dtype=torch.int32)
    order_row_kernel[(blocks,)](
        experts, upto, *order, pairs, count, blocks, first, stride,
        K=k, BLOCK=BLOCK_PAIRS, COLUMNS=32, EXPERTS=256, num_warps=8,
    )  # fmt: skip


@operation()
def expert_order(experts: torch.Tensor, count: int, first: int | None = None) -> Order:
    """Sorts token-expert pairs by expert, with no synchronisation of host and device.

    Args:
        experts: int32 ``[T, k]``, numbers in ``[0, count)`` or −1; rows may lie apart.
        count: number of experts, under 32,768.
        first: numbers are counted from it instead, and any outside of ``[first, first + count)`` are not served.
    """
    if experts.dim() != 2 or experts.dtype != torch.int32:
        raise ValueError(f"experts must be int32 [tokens, choices], not {experts.dtype} {tuple(experts.shape)}")
    if not 0 < count < 1 << 15:
        raise ValueError(f"{count} experts; from 1 to 32,767 can be ordered")
    pairs = experts.numel()
    if not runs_triton(experts) or not pairs:
        return expert_order_reference(experts, count, first)
    experts = experts if experts.stride(1) == 1 else experts.contiguous()
    tokens = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    row_ends = torch.empty(count, dtype=torch.int32, device=experts.device)
    order = Order(tokens, row_ends, torch.empty(experts.shape, dtype=torch.int32, device=experts.device))
    if pairs > COMPARED_PAIRS:
        _order_by_blocks(experts, order, first or 0)
        return order
    # Compiled for sm_90, not yet measured on a device.
    queries, block = 32, 128
    order_kernel[(cdiv(pairs + count, queries),)](
        experts, *order, pairs, count, first or 0, experts.stride(0),
        K=experts.shape[1], QUERIES=queries, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return order
