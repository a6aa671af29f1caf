"""Tokens with their experts and weights beside them, in one row of 32-bit words: a dispatch sends them at once.

    row = [token, in its dtype | experts, int32 · k | weights, float32 · k | zeros]

Tokens begin every row and rows are whole 16 bytes, so that the experts read them in the received buffer
(:func:`tokens_of`, :func:`choices_of`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas_reference, physical_expert
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_WORD, _ALIGNED = 4, 16  # bytes

# Elements of a token that a program copies: 16 bytes of bfloat16 a thread. Compiled for sm_90, not yet measured.
_COPIED = 1024


def row_words(hidden: int, dtype: torch.dtype, k: int) -> int:
    """Words of a row with a token ``[hidden]`` of ``dtype`` and k choices."""
    return cdiv((token_words(hidden, dtype) + 2 * k) * _WORD, _ALIGNED) * (_ALIGNED // _WORD)


def token_words(hidden: int, dtype: torch.dtype) -> int:
    """Words of a token in a row."""
    return cdiv(hidden * dtype.itemsize, _WORD)


def tokens_of(packed: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """The tokens ``[rows, hidden]`` of packed rows: a view."""
    return packed.view(dtype)[:, :hidden]


def choices_of(packed: torch.Tensor, hidden: int, dtype: torch.dtype, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts ``[rows, k]`` and weights ``[rows, k]`` of packed rows: views."""
    choices = packed[:, token_words(hidden, dtype) :]
    return choices[:, :k], choices[:, k : 2 * k].view(torch.float32)


def pack_tokens_reference(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    source: torch.Tensor | None,
    rows: int,
    replicas: Replicas | None = None,
) -> torch.Tensor:
    (count, hidden), k = tokens.shape, experts.shape[1]
    if replicas is not None:
        experts = choose_replicas_reference(experts, *replicas)
    if source is not None:
        tokens, experts, weights, count = tokens[source], experts[source], weights[source], rows
    packed = torch.zeros(rows, row_words(hidden, tokens.dtype, k), dtype=torch.int32, device=tokens.device)
    tokens_of(packed, hidden, tokens.dtype)[:count] = tokens
    choices = packed[:, token_words(hidden, tokens.dtype) :]
    choices[:, :k] = -1
    choices[:count, :k] = experts
    choices[:count, k : 2 * k] = weights.view(torch.int32)
    return packed


@triton.jit(do_not_specialize=["count", "first"])
def pack_tokens_kernel(
    tokens, experts, weights, source, replicas, token_part, packed,
    count, token_stride, expert_stride, weight_stride, first,
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, TOKEN_WORDS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr,
    CHOICES: tl.constexpr, REPLICAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of one token a program; the first also writes the choices. ``token_part`` is ``packed`` in the tokens'
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
        word = tl.arange(0, CHOICES)
        expert = tl.load(experts + at * expert_stride + word, mask=known & (word < K), other=-1)
        if replicas is not None:
            expert = physical_expert(expert, first + at, replicas, REPLICAS)
        is_weight = (word >= K) & (word < 2 * K)
        weight = tl.load(weights + at * weight_stride + word - K, mask=known & is_weight, other=0.0)
        words = tl.where(word < K, expert, weight.to(tl.int32, bitcast=True))
        tl.store(packed + row * WIDTH + TOKEN_WORDS + word, words, mask=word < WIDTH - TOKEN_WORDS)


@operation()
def pack_tokens(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    rows: int | None = None,
    replicas: Replicas | None = None,
) -> torch.Tensor:
    """Packs tokens, with their choices of experts, for one collective.

    Args:
        tokens: ``[T, hidden]`` of a dtype of at most 4 bytes.
        experts: ``[T, k]`` int32, −1: no expert.
        weights: ``[T, k]`` float32.
        source: int32 ``[R]``: the token of each row; default: the tokens in their order.
        rows: without ``source``, at least T: rows after the tokens hold zeros and the experts −1; default: T.
        replicas: experts are logical ones, and the row has the physical ones of :func:`.choose_replicas`, which looks
            them up in a table with these arguments; default: the row has them as they are.

    Returns:
        int32 ``[rows, row_words(hidden, dtype, k)]``.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    (count, hidden), k = tokens.shape, experts.shape[1]
    if experts.shape != weights.shape or experts.shape[0] != count:
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, experts {tuple(experts.shape)}, weights {tuple(weights.shape)} do not fit"
        )
    if experts.dtype != torch.int32 or weights.dtype != torch.float32 or tokens.dtype.itemsize > _WORD:
        raise ValueError(
            "experts must be int32, weights float32 and tokens of at most 4 bytes a number, not "
            f"{experts.dtype}, {weights.dtype} and {tokens.dtype}"
        )
    if source is not None and rows is not None:
        raise ValueError("rows say how many there are without a source; with one there are as many as it names")
    count = count if source is None else source.shape[0]
    rows = count if rows is None else rows
    if rows < count:
        raise ValueError(f"{count} tokens do not fit in {rows} rows")
    if not runs_triton(tokens):
        return pack_tokens_reference(tokens, experts, weights, source, rows, replicas)
    words, width = token_words(hidden, tokens.dtype), row_words(hidden, tokens.dtype, k)
    packed = torch.empty(rows, width, dtype=torch.int32, device=tokens.device)
    tokens, experts, weights = (x if x.stride(1) == 1 else x.contiguous() for x in (tokens, experts, weights))
    padded = words * (_WORD // tokens.dtype.itemsize)
    block = min(_COPIED, next_power_of_2(padded))
    table, first = (None, 0) if replicas is None else (replicas.table.contiguous(), replicas.first)
    if rows:
        pack_tokens_kernel[(rows, cdiv(padded, block))](
            tokens, experts, weights, source, table, packed.view(tokens.dtype), packed,
            count, tokens.stride(0), experts.stride(0), weights.stride(0), first,
            HIDDEN=hidden, PADDED=padded, TOKEN_WORDS=words, WIDTH=width, K=k,
            CHOICES=next_power_of_2(width - words), REPLICAS=0 if table is None else table.shape[1], BLOCK=block,
            num_warps=max(1, block // 256),
        )  # fmt: skip
    return packed
