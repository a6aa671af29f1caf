"""Tokens with their experts and weights beside them, in one row of 32-bit words: a dispatch sends them at once.

    row = [token, in its dtype | topk_ids, int32 · k | topk_weights, float32 · k | zeros]

Tokens begin every row and rows are whole 16 bytes, so that the experts read them in the received buffer
(:func:`unpacked`).

Bits: exact.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton.language as tl

from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas_reference, physical_expert
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_WORD, _ALIGNED = 4, 16  # bytes

# Elements of a token that a program copies: 16 bytes of bfloat16 a thread.
_COPIED = 1024


@lru_cache(maxsize=64)
def row_words(hidden: int, dtype: torch.dtype, k: int) -> int:
    """Words of a row with a token ``[hidden]`` of ``dtype`` and k experts."""
    return cdiv((token_words(hidden, dtype) + 2 * k) * _WORD, _ALIGNED) * (_ALIGNED // _WORD)


@lru_cache(maxsize=64)
def token_words(hidden: int, dtype: torch.dtype) -> int:
    """Words of a token in a row."""
    return cdiv(hidden * dtype.itemsize, _WORD)


def tokens_of(packed: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The tokens ``[rows, hidden]`` of packed rows: a view."""
    return packed.view(dtype)[:, :hidden]


def unpacked(packed: torch.Tensor, like: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (width and dtype of ``like``), ``topk_ids`` and ``topk_weights`` of packed rows: views."""
    pairs = packed[:, token_words(like.shape[1], like.dtype) :]
    tokens = packed.view(like.dtype)[:, : like.shape[1]]
    return tokens, pairs[:, :k], pairs[:, k : 2 * k].view(torch.float32)


def pack_tokens_reference(
    tokens: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    source: torch.Tensor | None,
    rows: int,
    replicas: Replicas | None = None,
) -> torch.Tensor:
    (count, hidden), k = tokens.shape, topk_ids.shape[1]
    if replicas is not None:
        topk_ids = choose_replicas_reference(topk_ids, *replicas)
    if source is not None:
        tokens, topk_ids, topk_weights, count = tokens[source], topk_ids[source], topk_weights[source], rows
    packed = torch.zeros(rows, row_words(hidden, tokens.dtype, k), dtype=torch.int32, device=tokens.device)
    tokens_of(packed, hidden, tokens.dtype)[:count] = tokens
    pairs = packed[:, token_words(hidden, tokens.dtype) :]
    pairs[:, :k] = -1
    pairs[:count, :k] = topk_ids
    pairs[:count, k : 2 * k] = topk_weights.view(torch.int32)
    return packed


@kernel(do_not_specialize=["count", "first"])
def pack_tokens_kernel(
    tokens, topk_ids, topk_weights, source, replicas, token_part, packed,
    count, token_stride, expert_stride, weight_stride, first,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, TOKEN_WORDS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    PAIR_WORDS: tl.constexpr, REPLICAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one token a program; the first also writes the pairs. ``token_part`` is ``packed`` in the tokens'
    dtype, of which PADDED elements begin each row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    known = row < count
    at = row
    if source is not None:
        at = tl.load(source + row, mask=known, other=0).to(tl.int64)
    ratio: tl.constexpr = PADDED // TOKEN_WORDS  # elements of a word
    column = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(tokens + at * token_stride + column, mask=known & (column < HIDDEN), other=0.0)
    tl.store(token_part + row * (WIDTH * ratio) + column, values, mask=column < PADDED)
    if part == 0:
        word = tl.arange(0, PAIR_WORDS)
        expert = tl.load(topk_ids + at * expert_stride + word, mask=known & (word < K), other=-1)
        if replicas is not None:
            expert = physical_expert(expert, first + at, replicas, REPLICAS)
        is_weight = (word >= K) & (word < 2 * K)
        weight = tl.load(topk_weights + at * weight_stride + word - K, mask=known & is_weight, other=0.0)
        words = tl.where(word < K, expert, weight.to(tl.int32, bitcast=True))
        tl.store(packed + row * WIDTH + TOKEN_WORDS + word, words, mask=word < WIDTH - TOKEN_WORDS)


@operation()
def pack_tokens(
    tokens: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    rows: int | None = None,
    replicas: Replicas | None = None,
) -> torch.Tensor:
    """Packs tokens, with their experts and weights, for one collective.

    Args:
        tokens: ``[T, hidden]`` of a dtype of at most 4 bytes.
        topk_ids: ``[T, k]`` int32, −1: no expert.
        topk_weights: ``[T, k]`` float32.
        source: int32 ``[R]``: the token of each row; default: the tokens in their order.
        rows: without ``source``, at least T: rows after the tokens hold zeros and ``topk_ids`` −1; default: T.
        replicas: ``topk_ids`` are logical ones, and the row has the physical ones of :func:`.choose_replicas`, which
            looks them up in a table with these arguments; default: the row has them as they are.

    Returns:
        int32 ``[rows, row_words(hidden, dtype, k)]``.
    """
    (count, hidden), k = tokens.shape, topk_ids.shape[1]
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != count:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, topk_ids {tuple(topk_ids.shape)}, "
            f"topk_weights {tuple(topk_weights.shape)} do not fit"
        )
    if topk_ids.dtype != torch.int32 or topk_weights.dtype != torch.float32 or tokens.dtype.itemsize > _WORD:
        raise ValueError(
            "topk_ids must be int32, topk_weights float32 and tokens of at most 4 bytes a number, not "
            f"{topk_ids.dtype}, {topk_weights.dtype} and {tokens.dtype}"
        )
    if source is not None and rows is not None:
        raise ValueError("rows say how many there are without a source; with one there are as many as it names")
    count = count if source is None else source.shape[0]
    rows = count if rows is None else rows
    if rows < count:
        raise ValueError(f"{count} tokens do not fit in {rows} rows")
    if not runs_triton(tokens):
        return pack_tokens_reference(tokens, topk_ids, topk_weights, source, rows, replicas)
    words, width = token_words(hidden, tokens.dtype), row_words(hidden, tokens.dtype, k)
    packed = torch.empty(rows, width, dtype=torch.int32, device=tokens.device)
    if tokens.stride(1) != 1 or topk_ids.stride(1) != 1 or topk_weights.stride(1) != 1:
        tokens, topk_ids, topk_weights = tokens.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    padded = words * (_WORD // tokens.dtype.itemsize)
    block = min(_COPIED, next_power_of_2(padded))
    table, first = (None, 0) if replicas is None else (replicas.table.contiguous(), replicas.first)
    if rows:
        pack_tokens_kernel[(rows, cdiv(padded, block))](
            tokens, topk_ids, topk_weights, source, table, packed.view(tokens.dtype), packed,
            count, tokens.stride(0), topk_ids.stride(0), topk_weights.stride(0), first,
            HIDDEN=hidden, PADDED=padded, TOKEN_WORDS=words, WIDTH=width, K=k,
            PAIR_WORDS=next_power_of_2(width - words), REPLICAS=0 if table is None else table.shape[1], BLOCK=block,
            num_warps=max(1, block // 256),
        )  # fmt: skip
    return packed
