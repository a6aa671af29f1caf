"""Token-expert pairs in the order of their experts.

Pair ``t · k + j`` is ``topk_ids[t, j]``. Pairs are sorted by expert and, within one, by token; those of other ranks
(−1) come last.

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

# Largest number of pairs that are ranked by comparing all with all: one launch, but quadratic work. Of more, each
# program counts those of all tokens if it reads few of them, token by token and so many experts of a word at a time;
# else they are compared within blocks of so many, whose counts are added up before. Not yet measured on a device.
COMPARED_PAIRS, READ_TOKENS, BLOCK_PAIRS = 8192, 1 << 14, 256


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


@triton.jit
def _keys_of(topk_ids, table, token, tokens, count, first, stride, K: tl.constexpr, K_PAD: tl.constexpr):
    """[tokens, K_PAD]: each pair's expert counted from ``first``, or what ``table`` has for it; −1 of other ranks."""
    column = tl.arange(0, K_PAD)[None, :]
    key = tl.load(topk_ids + token[:, None] * stride + column, mask=(token[:, None] < tokens) & (column < K), other=-1)
    if table is not None:
        return tl.load(table + key, mask=key >= 0, other=-1)
    return tl.where((key >= first) & (key - first < count), key - first, -1)


@triton.jit
def _numbers_of(keys, begin, BITS: tl.constexpr, ONCE: tl.constexpr):
    """[tokens, 32 / BITS]: how many of a token's keys are each of those from ``begin`` on, counted in one word; with
    ONCE at most one."""
    key = keys - begin
    there = (key >= 0) & (key < 32 // BITS)
    ones = tl.where(there, tl.full(key.shape, 1, tl.int32) << tl.where(there, key, 0) * BITS, 0)
    shifts = (tl.arange(0, 32 // BITS) * BITS)[None, :]
    numbers = (tl.sum(ones, axis=1)[:, None] >> shifts) & ((1 << BITS) - 1)
    return tl.minimum(numbers, 1) if ONCE else numbers


@kernel(do_not_specialize=["tokens", "count", "first", "blocks", "tables", "experts"])
def token_order_kernel(
    topk_ids, table, sources, row_ends, pair_rows, ranks, counts, tokens, count, first, stride, blocks, tables, experts,
    K: tl.constexpr, K_PAD: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of ``blocks`` a program, which counts the keys of all tokens: a pair's row comes after all of
    smaller keys, and those of its own in the tokens before. With ONCE a token has one row for a key, of the first pair
    that has it; keys are those of the last of ``tables``. Further programs make ``counts``, of some keys of a table."""
    FIELDS: tl.constexpr = 32 // BITS
    own = tl.program_id(0) * TOKENS
    inside, number, column = tl.arange(0, TOKENS), tl.arange(0, FIELDS), tl.arange(0, K_PAD)[None, :]
    if tl.program_id(0) < blocks:
        if table is not None:
            table += (tables - 1) * experts
        token = own + inside
        keys = _keys_of(topk_ids, table, token, tokens, count, first, stride, K, K_PAD)
        alike = (keys[:, :, None] == keys[:, None, :]) & (column[:, None, :] < column[:, :, None])
        row = tl.sum(alike.to(tl.int32), axis=2)
        counted = keys >= 0
        if ONCE:
            counted &= row == 0
        start, passed = 0, 0  # rows of smaller keys; those of tokens before
        for begin in range(0, count, FIELDS):
            before = tl.zeros((TOKENS, FIELDS), tl.int32)
            for at in range(0, own, TOKENS):
                others = _keys_of(topk_ids, table, at + inside, tokens, count, first, stride, K, K_PAD)
                before += _numbers_of(others, begin, BITS, ONCE)
            total = before
            for at in range(own, tokens, TOKENS):
                others = _keys_of(topk_ids, table, at + inside, tokens, count, first, stride, K, K_PAD)
                total += _numbers_of(others, begin, BITS, ONCE)
            here = _numbers_of(keys, begin, BITS, ONCE)
            of_key, of_earlier = tl.sum(total, axis=0), tl.sum(before, axis=0)
            upto = start + tl.cumsum(of_key, axis=0)
            tl.store(row_ends + begin + number, upto, mask=(begin + number < count) & (own == 0))
            rows = (upto - of_key + of_earlier)[None, :] + tl.cumsum(here, axis=0) - here
            key = keys - begin
            there = (key >= 0) & (key < FIELDS)
            row += tl.where(there, tl.gather(rows, tl.where(there, key, 0), axis=1), 0)
            start += tl.sum(of_key)
            passed += tl.sum(of_earlier)
        each = counted.to(tl.int32)
        of_token = tl.sum(each, axis=1)
        passed += (tl.cumsum(of_token, axis=0) - of_token)[:, None] + tl.cumsum(each, axis=1) - each
        pair, known = token[:, None] * K + column, (token[:, None] < tokens) & (column < K)
        tl.store(sources + tl.where(counted, row, start + pair - passed), token[:, None], mask=known)
        tl.store(pair_rows + pair, tl.where(counted, row, -1), mask=known)
        if ranks is not None:
            tl.store(ranks + pair, keys, mask=known)
    elif counts is not None:
        parts = tl.cdiv(count, FIELDS)
        part = tl.program_id(0) - blocks
        which, begin = part // parts, part % parts * FIELDS
        goes, pairs = tl.zeros((TOKENS, FIELDS), tl.int32), tl.zeros((TOKENS, FIELDS), tl.int32)
        for at in range(0, tokens, TOKENS):
            others = _keys_of(topk_ids, table + which * experts, at + inside, tokens, count, first, stride, K, K_PAD)
            here = _numbers_of(others, begin, BITS, False)
            goes += tl.minimum(here, 1)
            pairs += here
        into = counts + ((begin + number) * tables + which) * 2
        tl.store(into, tl.sum(goes, axis=0), mask=begin + number < count)
        tl.store(into + 1, tl.sum(pairs, axis=0), mask=begin + number < count)


def _bits(k: int) -> int:
    """Of a word, for a number of up to ``k``; more than 16 numbers of a token would not fit into registers."""
    return max(2, next_power_of_2(k.bit_length()))


def order_by_tokens(
    topk_ids: torch.Tensor, order: Order, first: int = 0, tables: torch.Tensor | None = None,
    ranks: torch.Tensor | None = None, counts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fills ``order`` by one launch; with ``tables [n, experts]``, of ranks, also what :func:`.token_ranks` gives."""
    (tokens, k), count = topk_ids.shape, len(order.row_ends)
    padded, bits = next_power_of_2(k), _bits(k)
    # 4 pairs a thread, and 32 pairs of pairs of a token.
    at_once = min(next_power_of_2(tokens), 256, max(1, (1 << 14) // padded**2))
    blocks, (each, experts) = cdiv(tokens, at_once), (0, 0) if tables is None else tables.shape
    parts = 0 if counts is None else each * cdiv(count, 32 // bits)
    token_order_kernel[(blocks + parts,)](
        topk_ids, tables, *order, ranks, counts, tokens, count, first, topk_ids.stride(0), blocks, each, experts,
        K=k, K_PAD=padded, TOKENS=at_once, BITS=bits, ONCE=tables is not None,
        num_warps=min(16, max(1, at_once * max(padded, 32 // bits) // 128)),
    )  # fmt: skip


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
        reads = topk_ids.shape[0] * cdiv(count, 32 // _bits(topk_ids.shape[1]))
        (order_by_tokens if reads <= READ_TOKENS else _order_by_blocks)(topk_ids, order, first or 0)
        return order
    queries, block = 32, 128
    order_kernel[(cdiv(pairs + count, queries),)](
        topk_ids, *order, pairs, count, first or 0, topk_ids.stride(0),
        K=topk_ids.shape[1], QUERIES=queries, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return order
