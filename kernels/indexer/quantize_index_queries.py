"""Index queries for an FP8 cache of index keys: turned, transformed and quantised in one pass.

    q[:rotated] = RoPE(q[:rotated])            the first dimensions only, rounded once
    q = Hadamard(q) · dim^-0.5                 rounded once; the keys have passed the same, so products stay
    q = scale · e4m3(q / scale)                one scale a token and head
    w = w · scale                              head weights: the scale is a factor of its head's score

DeepSeek-V3.2-Exp, section 2.1.

Bits of a query: they depend on that query alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.rows.rope import (
    check_angles,
    load_angles,
    load_pairs,
    load_rest,
    rotate_first_reference,
    row_parts,
    turn,
)
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Programs to a multiprocessor: each makes the signs once and takes tile after tile, loading the next while it works.
_PROGRAMS, _WARPS = 2, 4


def quantize_index_queries_reference(
    q: torch.Tensor, weights: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_format: IndexKeyFormat,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    codes, scales = key_format.encode(rotate_first_reference(q, cos, sin, interleaved))
    assert scales is not None
    return codes, weights * scales.squeeze(-1)


@kernel(do_not_specialize=["tokens"])
def quantize_index_queries_kernel(
    q, weights, cos, sin, codes, weighted, tokens, heads,
    q_token, q_head, weights_stride, cos_stride, sin_stride, head_tiles,
    DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Tiles of HEADS heads of TOKENS tokens, from this program's number on in steps of the number of programs."""
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    column = tl.arange(0, DIM)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS) * head_tiles, tl.num_programs(0)):
        first = (tile // head_tiles).to(tl.int64) * TOKENS
        token = first + row // HEADS
        head = (tile % head_tiles).to(tl.int64) * HEADS + row % HEADS
        inside = (token < tokens) & (head < heads)
        source = q + token * q_token + head * q_head
        a, b = load_pairs(source, inside, HALF, PADDED, INTERLEAVED)
        rest = a
        if REST_PADDED > 0:
            rest, _ = load_rest(source, inside, HALF, DIM, REST_PADDED)
        c = load_angles(cos, first, tokens, cos_stride, TOKENS, HEADS, HALF, PADDED)
        s = load_angles(sin, first, tokens, sin_stride, TOKENS, HEADS, HALF, PADDED)
        a, b = turn(a, b, c, s)
        code, scale = FORMAT.encode(a, b, rest, HALF, PADDED, DIM, REST_PADDED, INTERLEAVED, POWER_OF_TWO, CONVERTS)
        weight = tl.load(weights + token * weights_stride + head, mask=inside)
        at = token * heads + head
        tl.store(codes + at * DIM + column, code, mask=inside)
        tl.store(weighted + at, weight * scale, mask=inside)


def _numbers(given: dict[str, Any], result: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    codes, weights = result
    return [codes.float() * weights[..., None]]


@operation(decoded=_numbers)
def quantize_index_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    key_format: IndexKeyFormat,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index queries as products with coded index keys take them, and their head weights.

    Args:
        q: ``[T, heads, dim]``, the output of wq_b; the last dimension contiguous.
        weights: float32 ``[T, heads]``, the output of weights_proj.
        cos, sin: float32 ``[T, rotated / 2]``.
        key_format: format of the keys, coded.
        interleaved: see :mod:`.rows.rope`.

    Returns:
        codes ``[T, heads, dim]`` and float32 ``weights · scales [T, heads]``, where ``query = code · scale``.
    """
    tokens, heads, dim = q.shape
    rotated = 2 * cos.shape[-1]
    if rotated > dim:
        raise ValueError(f"{rotated} rotated columns do not fit queries of {dim}")
    if weights.shape != (tokens, heads) or weights.dtype != torch.float32:
        raise ValueError(
            f"weights must be float32 [{tokens}, {heads}], one for each query, not {weights.dtype} "
            f"{list(weights.shape)}"
        )
    check_angles(cos, sin, tokens)
    if dim != key_format.dim:
        raise ValueError(f"queries of {dim} numbers do not fit keys of {key_format}")
    if not runs_triton(q):
        return quantize_index_queries_reference(q, weights, cos, sin, key_format, interleaved)
    q = q if q.stride(2) == 1 else q.contiguous()
    weights = weights if weights.stride(1) == 1 else weights.contiguous()
    codes = torch.empty(q.shape, dtype=key_format.dtype, device=q.device)
    weighted = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if q.numel():
        rows = key_format.rows_at_once(q)
        heads_at_once = min(next_power_of_2(heads), rows)
        tokens_at_once = rows // heads_at_once
        head_tiles = cdiv(heads, heads_at_once)
        tiles = cdiv(tokens, tokens_at_once) * head_tiles
        quantize_index_queries_kernel[(min(tiles, _PROGRAMS * chip_of(q).multiprocessors),)](
            q, weights, cos, sin, codes.view(key_format.pool_dtype), weighted, tokens, heads,
            q.stride(0), q.stride(1), weights.stride(0), cos.stride(0), sin.stride(0), head_tiles,
            **row_parts(dim, rotated, key_format.least_part), TOKENS=tokens_at_once, HEADS=heads_at_once,
            INTERLEAVED=interleaved, FORMAT=key_format.helpers, POWER_OF_TWO=key_format.power_of_two,
            CONVERTS=chip_of(q).converts_e4m3, num_warps=_WARPS,
        )  # fmt: skip
    return codes, weighted
