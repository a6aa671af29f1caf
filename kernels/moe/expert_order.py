"""Where routed tokens go: to which replica of an expert, to which ranks, and, sorted by expert, to which row.

A pair t, j is ``topk_ids[t, j]``; −1: no expert.

* :func:`choose_replicas`, of a logical expert, for each pair:

      turn(t) = frac((first + t) · √2);   physical[t, j] = replica ⌊turn(t) · n⌋ of the n replicas of topk_ids[t, j]

  Multiples of √2 divide any run of consecutive rows evenly, and every second or third of them too. Which replica works
  on a token follows from its row, and replicas are equal.
* :func:`token_ranks`: each token once to every rank that holds some of its experts:

      ranks[t, j] = rank_of[topk_ids[t, j]];   first[t, j] = ranks[t, j] where no i < j of the token has it, else −1
      counts[r] = (how many first are r: tokens that go there,  how many ranks are r: its pairs)

* :func:`expert_order`: pairs sorted by expert and, within one, by token; those of other ranks (−1) come last:

      row = pair_rows[t, j]:  tokens[row] = t;   expert e has the rows  row_ends[e − 1] … row_ends[e] − 1

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

# Nothing here is measured on a device yet; all is compiled for sm_90.
_REPLICA_PAIRS = 1024  # of a program that chooses replicas
_ROOT = tl.constexpr(0x6A09E667)  # 2³² · frac(√2); the product of 32-bit numbers keeps the fraction
_PAIRS, _RANKS = 256, 16  # of a program that finds ranks: pairs, and ranks that they are compared with at a time
# Largest number of pairs that are ranked by comparing all with all: one launch, but quadratic work. More are
# compared within blocks of so many, whose counts are added up before.
COMPARED_PAIRS, BLOCK_PAIRS = 8192, 256


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
        choose_replicas_kernel[(cdiv(count, _REPLICA_PAIRS),)](
            topk_ids, replicas.contiguous(), physical, count, first,
            WIDTH=replicas.shape[1], K=topk_ids.shape[1], BLOCK=_REPLICA_PAIRS, num_warps=4,
        )  # fmt: skip
    return physical


class TokenRanks(NamedTuple):
    """Everything is on the device; −1: no expert."""

    ranks: torch.Tensor  # [T, k] int32: the rank of every pair
    first: torch.Tensor  # [T, k] int32: the same, −1 where an earlier pair of the token has the same rank
    counts: torch.Tensor  # [size, 2] int32: tokens that go to each rank, and its pairs


def token_ranks_reference(topk_ids: torch.Tensor, rank_of: torch.Tensor, size: int) -> TokenRanks:
    k = topk_ids.shape[1]
    ranks = rank_of[topk_ids.long()].masked_fill_(topk_ids < 0, -1)
    earlier = torch.ones(k, k, dtype=torch.bool, device=topk_ids.device).tril(-1)
    again = ((ranks[:, :, None] == ranks[:, None, :]) & earlier).any(dim=-1)
    first = ranks.masked_fill(again, -1)
    at = torch.stack((first, ranks)).view(2, -1).long() + 1  # pairs without an expert come first
    counts = torch.zeros(2, size + 1, dtype=torch.int32, device=topk_ids.device)
    counts.scatter_add_(1, at, counts.new_ones(()).expand_as(at))
    return TokenRanks(ranks, first, counts[:, 1:].t().contiguous())


@triton.jit
def _rank(topk_ids, rank_of, token, column, known, stride):
    expert = tl.load(topk_ids + token * stride + column, mask=known, other=-1)
    return tl.load(rank_of + expert, mask=expert >= 0, other=-1)


@kernel(do_not_specialize=["tokens", "size"])
def token_ranks_kernel(
    topk_ids, rank_of, ranks, first, counts, tokens, size, expert_stride,
    K: tl.constexpr, TOKENS: tl.constexpr, K_PAD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens a program. Counts add up as whole numbers, the same in any order."""
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
    goes, pair_ranks = tl.reshape(once, (TOKENS * K_PAD,)), tl.reshape(rank, (TOKENS * K_PAD,))
    for from_rank in range(0, size, RANKS):
        number = from_rank + tl.arange(0, RANKS)
        rows = tl.sum((goes[:, None] == number[None, :]).to(tl.int32), axis=0)
        pairs = tl.sum((pair_ranks[:, None] == number[None, :]).to(tl.int32), axis=0)
        tl.atomic_add(counts + 2 * number, rows, mask=(number < size) & (rows > 0))
        tl.atomic_add(counts + 2 * number + 1, pairs, mask=(number < size) & (pairs > 0))


@operation()
def token_ranks(topk_ids: torch.Tensor, rank_of: torch.Tensor, size: int) -> TokenRanks:
    """Finds the ranks that the tokens of a dispatch go to, with no synchronisation of host and device.

    Args:
        topk_ids: int32 ``[T, k]``, experts of all ranks; −1: no expert.
        rank_of: int32 ``[experts]``: the rank of each.
        size: number of ranks.
    """
    if topk_ids.dim() != 2 or rank_of.dim() != 1 or topk_ids.dtype != torch.int32 or rank_of.dtype != torch.int32:
        raise ValueError(
            "topk_ids must be int32 [tokens, k] and rank_of int32 [experts], not "
            f"{topk_ids.dtype} {tuple(topk_ids.shape)} and {rank_of.dtype} {tuple(rank_of.shape)}"
        )
    if size < 1:
        raise ValueError(f"tokens go to 1 rank or more, not to {size}")
    if not runs_triton(topk_ids):
        return token_ranks_reference(topk_ids, rank_of, size)
    (tokens, k), device = topk_ids.shape, topk_ids.device
    ranks = torch.empty(tokens, k, dtype=torch.int32, device=device)
    first = torch.empty_like(ranks)
    counts = torch.zeros(size, 2, dtype=torch.int32, device=device)
    if topk_ids.numel():
        topk_ids = topk_ids if topk_ids.stride(1) == 1 else topk_ids.contiguous()
        padded = next_power_of_2(k)
        at_once = max(1, _PAIRS // padded)
        token_ranks_kernel[(cdiv(tokens, at_once),)](
            topk_ids, rank_of.contiguous(), ranks, first, counts, tokens, size, topk_ids.stride(0),
            K=k, TOKENS=at_once, K_PAD=padded, RANKS=min(_RANKS, next_power_of_2(size)), num_warps=4,
        )  # fmt: skip
    return TokenRanks(ranks, first, counts)


class Order(NamedTuple):
    """Pairs sorted by expert. Everything is on the device, and the host does not know how many are local."""

    tokens: torch.Tensor  # [T · k] int32: the token of every row; rows of local pairs come first
    row_ends: torch.Tensor  # [experts] int32: the index after each expert's last row; the last: all local pairs
    pair_rows: torch.Tensor  # [T, k] int32: the row of every pair, −1 where it is not local


def local_topk_ids(topk_ids: torch.Tensor, count: int, first: int | None) -> torch.Tensor:
    """The numbers of :func:`expert_order` counted from ``first``, −1 for those of other ranks."""
    if first is None:
        return topk_ids
    local = topk_ids - first
    return local.masked_fill_((local < 0) | (local >= count), -1)


def expert_order_reference(topk_ids: torch.Tensor, count: int, first: int | None = None) -> Order:
    topk_ids = local_topk_ids(topk_ids, count, first)
    pairs = topk_ids.flatten()
    # Two bytes are enough for a number, and are sorted in half the time of four.
    keys = pairs.to(torch.int16).masked_fill_(pairs < 0, count)
    keys, order = keys.sort(stable=True)
    row_ends = torch.searchsorted(
        keys, torch.arange(count, dtype=keys.dtype, device=keys.device), right=True, out_int32=True
    )
    rows = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
    pair_rows = torch.empty_like(rows).scatter_(0, order, rows).masked_fill_(pairs < 0, -1)
    tokens = (order // max(1, topk_ids.shape[1])).int()
    return Order(tokens, row_ends, pair_rows.view(topk_ids.shape))


@triton.jit
def _keys(topk_ids, pair, pairs, count, first, stride, K: tl.constexpr):
    """The expert of each pair, counted from ``first``; ``count`` for pairs of other ranks."""
    expert = tl.load(topk_ids + pair // K * stride + pair % K, mask=pair < pairs, other=-1) - first
    return tl.where((expert >= 0) & (expert < count), expert, count)


@kernel(do_not_specialize=["first"])
def order_kernel(
    topk_ids, tokens, row_ends, pair_rows, pairs, count, first, stride,
    K: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ranks by counting. A pair's key is ``expert · pairs + pair``, and its row is the number of smaller keys. The rows
    of expert e end after as many keys as are under ``(e + 1) · pairs``."""
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_pair = query < pairs
    expert = _keys(topk_ids, query, pairs, count, first, stride, K)
    below = tl.where(is_pair, expert * pairs + query, (query - pairs + 1) * pairs)[:, None]
    smaller = tl.zeros((QUERIES, BLOCK), tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        others = _keys(topk_ids, pair, pairs, count, first, stride, K)
        keys = tl.where(pair < pairs, others * pairs + pair, 2147483647)
        smaller += (keys[None, :] < below).to(tl.int32)
    rank = tl.sum(smaller, axis=1)
    tl.store(tokens + rank, query // K, mask=is_pair)
    tl.store(pair_rows + query, tl.where(expert == count, -1, rank), mask=is_pair)
    tl.store(row_ends + (query - pairs), rank, mask=(query >= pairs) & (query < pairs + count))


@kernel(do_not_specialize=["pairs", "count", "blocks", "first"])
def order_count_kernel(
    topk_ids, counts, pairs, count, blocks, first, stride, K: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    """A block of pairs a program: the number of them for each expert, ``counts [count + 1, blocks]``."""
    block = tl.program_id(0)
    pair = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.where(pair < pairs, _keys(topk_ids, pair, pairs, count, first, stride, K), -1)
    for start in range(0, count + 1, EXPERTS):
        number = start + tl.arange(0, EXPERTS)
        here = tl.sum((keys[:, None] == number[None, :]).to(tl.int32), axis=0)
        tl.store(counts + number.to(tl.int64) * blocks + block, here, mask=number <= count)


@kernel(do_not_specialize=["pairs", "count", "blocks", "first"])
def order_row_kernel(
    topk_ids, upto, tokens, row_ends, pair_rows, pairs, count, blocks, first, stride,
    K: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A block of pairs a program. ``upto [count + 1, blocks]`` has the counts added up, expert by expert and within one
    block by block: a pair's row comes after all that were added up before its block's, and after the pairs of its
    expert that precede it in the block."""
    block = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    pair = block * BLOCK + inside
    known = pair < pairs
    key = _keys(topk_ids, pair, pairs, count, first, stride, K)
    at = key.to(tl.int64) * blocks + block
    row = tl.load(upto + at - 1, mask=known & (at > 0), other=0)
    for start in range(0, BLOCK, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        others = _keys(topk_ids, block * BLOCK + column, pairs, count, first, stride, K)
        before = (others[None, :] == key[:, None]) & (column[None, :] < inside[:, None])
        row += tl.sum(before.to(tl.int32), axis=1)
    tl.store(tokens + row, (pair // K).to(tl.int32), mask=known)
    tl.store(pair_rows + pair, tl.where(key == count, -1, row), mask=known)
    if block == 0:
        for start in range(0, count, EXPERTS):
            number = start + tl.arange(0, EXPERTS)
            end = tl.load(upto + (number.to(tl.int64) + 1) * blocks - 1, mask=number < count, other=0)
            tl.store(row_ends + number, end, mask=number < count)


def _order_by_blocks(topk_ids: torch.Tensor, order: Order, first: int) -> None:
    """Fills ``order`` by a counting sort."""
    pairs, count, blocks = topk_ids.numel(), len(order.row_ends), cdiv(topk_ids.numel(), BLOCK_PAIRS)
    stride, k = topk_ids.stride(0), topk_ids.shape[1]
    counts = torch.empty(count + 1, blocks, dtype=torch.int32, device=topk_ids.device)
    order_count_kernel[(blocks,)](
        topk_ids, counts, pairs, count, blocks, first, stride,
        K=k, BLOCK=BLOCK_PAIRS, EXPERTS=min(32, next_power_of_2(count + 1)), num_warps=4,
    )  # fmt: skip
    upto = counts.view(-1).cumsum(0, dtype=torch.int32)
    order_row_kernel[(blocks,)](
        topk_ids, upto, *order, pairs, count, blocks, first, stride,
        K=k, BLOCK=BLOCK_PAIRS, COLUMNS=32, EXPERTS=256, num_warps=8,
    )  # fmt: skip


@operation()
def expert_order(topk_ids: torch.Tensor, count: int, first: int | None = None) -> Order:
    """Sorts token-expert pairs by expert, with no synchronisation of host and device.

    Args:
        topk_ids: int32 ``[T, k]``, numbers in ``[0, count)`` or −1; rows need not be contiguous.
        count: number of experts, under 32,768.
        first: numbers are counted from it instead, and any outside of ``[first, first + count)`` are other ranks'.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype != torch.int32:
        raise ValueError(f"topk_ids must be int32 [tokens, k], not {topk_ids.dtype} {tuple(topk_ids.shape)}")
    if not 0 < count < 1 << 15:
        raise ValueError(f"{count} experts; from 1 to 32,767 can be ordered")
    pairs = topk_ids.numel()
    if not runs_triton(topk_ids) or not pairs:
        return expert_order_reference(topk_ids, count, first)
    topk_ids = topk_ids if topk_ids.stride(1) == 1 else topk_ids.contiguous()
    tokens = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)
    row_ends = torch.empty(count, dtype=torch.int32, device=topk_ids.device)
    order = Order(tokens, row_ends, torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device))
    if pairs > COMPARED_PAIRS:
        _order_by_blocks(topk_ids, order, first or 0)
        return order
    queries, block = 32, 128
    order_kernel[(cdiv(pairs + count, queries),)](
        topk_ids, *order, pairs, count, first or 0, topk_ids.stride(0),
        K=topk_ids.shape[1], QUERIES=queries, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return order
