"""Scores of the lightning indexer (DeepSeek-V3.2-Exp, equation 1).

    score[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])        s ≤ position of t

Shapes: ``q [T, heads, dim]``, ``w [T, heads]`` float32 with every scale already in it, ``pool [pages, page_size,
dim]`` in the dtype of q; scores are float32 ``[T, S]``, S the largest number of tokens that a query sees. Columns
beyond a row's visible tokens are not defined and must not be read.

Coded queries and keys (in FP8: e4m3, passed through the Hadamard transform and quantised by row) have scales. A scale
is positive and relu is homogeneous: the caller multiplies the scale of a query row into ``w[t, h]``; that of a key is
multiplied in after the sum over heads.

Bits of a score: they depend on the query, the key, and whether the call's longest segment has more than two queries, as
the two kernels add over heads in tiles of their own; under :func:`.launch.batch_invariance` that of many queries runs
always.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.indexer._arguments import check_indexer_arguments, read_index_keys
from dsa_engine.kernels.indexer._score_kernels import score_span_kernel, score_tile_kernel
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import chip_of, config_for, dot_precision, is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# The per-head products of one tile on a CPU stay within a core's cache.
_CPU_TILE_BYTES = 4 << 20
_KEY_TILE = 1024
_MANY_QUERIES = 64  # in a segment: as many as a tile holds at most


def indexer_scores_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    key_format: IndexKeyFormat,
    tile_bytes: int,
) -> torch.Tensor:
    scores = torch.empty(q.shape[0], segments.longest, dtype=torch.float32, device=q.device)
    for s in segments:
        segment = slice(s.row, s.row + s.length)
        queries, by_head, into = q[segment].float(), weights[segment].unsqueeze(1), scores[segment, None, : s.end]
        heads = q.shape[1]
        rows = min(s.length, max(1, tile_bytes // (4 * heads * _KEY_TILE)))
        # Reused: fresh pages for every tile cost more than the product.
        buffer = queries.new_empty(rows * heads * min(_KEY_TILE, s.end))
        for first_key in range(0, s.end, _KEY_TILE):
            last_key = min(first_key + _KEY_TILE, s.end)
            keys = read_index_keys(pool, block_tables[s.sequence], first_key, last_key, key_format).t()
            # Queries before this tile of keys see none of it.
            for row in range(max(0, first_key - s.start) // rows * rows, s.length, rows):
                tile = slice(row, min(row + rows, s.length))
                flat = queries[tile].flatten(0, 1)
                products = buffer[: flat.shape[0] * keys.shape[1]].view(flat.shape[0], keys.shape[1])
                torch.mm(flat, keys, out=products).relu_()
                of_head = products.view(-1, heads, keys.shape[1])
                torch.bmm(by_head[tile], of_head, out=into[tile, :, first_key:last_key])
    return scores


class _Config(NamedTuple):
    keys: int  # in a tile
    lanes: int  # queries · heads in a step
    warps: int
    stages: int  # tiles of the operand that streams: in use and under way


# Tiles: bound by the tensor cores if two programs share a multiprocessor, one multiplying while the other weighs and
# sums: 115,712 bytes and under 128 registers a thread just allow it. With 256 keys, not 128, queries come from L2 at 16
# bytes a cycle at the tensor cores' full rate, not at 32.
_TILE_CONFIGS = {80: _Config(128, 64, 4, 3), 90: _Config(256, 64, 8, 3), 120: _Config(128, 64, 8, 3)}
# Two programs, each with three tiles of 16 KiB under way, cover what memory needs.
_SPAN_CONFIGS = {80: _Config(64, 128, 4, 3), 90: _Config(64, 128, 4, 4)}
# Not for the tensor cores: a larger tile does not fit the registers.
_FLOAT32_CONFIG = _Config(32, 64, 8, 2)


def _launch(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_tables: torch.Tensor, segments: Segments,
    key_format: IndexKeyFormat,
) -> torch.Tensor:  # fmt: skip
    (rows, heads, dim), width = q.shape, segments.longest
    # A row stride of whole 64 bytes lets readers of the scores load 16 bytes at a time.
    scores = torch.empty(rows, cdiv(width, 16) * 16, dtype=torch.float32, device=q.device)[:, :width]
    if not rows:
        return scores
    keys, key_scales = key_format.views(pool)
    q, keys = key_format.operands(q, keys, chip_of(q))
    max_length = _MANY_QUERIES if is_batch_invariant() else segments.max_length
    streams_keys = max_length <= 2
    config = config_for(_SPAN_CONFIGS if streams_keys else _TILE_CONFIGS, chip_of(q))
    if q.dtype == torch.float32:
        config = _FLOAT32_CONFIG
    block_heads, block_dim = max(16, next_power_of_2(heads)), max(32, next_power_of_2(dim))
    queries = max(1, min(2, max_length, config.lanes // block_heads))
    # Wider queries than those of the known models take fewer keys at a time, and keys 64 KiB at most.
    fitting = min((64 << 10) // (block_dim * q.element_size()), config.keys * config.lanes // block_heads)
    block_keys = max(16, min(config.keys, fitting))
    programs = 8 * chip_of(q).multiprocessors  # at least, if that leaves them enough to do
    if streams_keys:
        span = block_keys * min(32, max(4, sum(s.end for s in segments) // (programs * block_keys)))
        size, kernel, extra = queries, score_span_kernel, {"span": span, "STAGES": config.stages}
    else:
        span, fair = block_keys, rows * width // (programs * block_keys)
        size = next_power_of_2(min(_MANY_QUERIES, max(8, fair), max_length))
        kernel, extra = score_tile_kernel, {"num_stages": config.stages}
    tiles = segments.tiles(size)
    kernel[(cdiv(width, span), len(tiles))](
        q, weights, keys, key_scales, block_tables, tiles, segments.sequences, segments.visible, scores,
        block_tables.stride(0), keys.stride(0), 0 if key_scales is None else key_scales.stride(0), scores.stride(0),
        FORMAT=key_format.helpers, HEADS=heads, DIM=dim, PAGE_SIZE=pool.shape[1], PRECISION=dot_precision(q.dtype),
        BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, BLOCK_KEYS=block_keys, QUERIES=queries,
        num_warps=config.warps, **extra,
    )  # fmt: skip
    return scores


def _seen(*args: Any, **_: Any) -> torch.Tensor:
    """A mask of the scores that :func:`indexer_scores` defines for these arguments."""
    segments: Segments = args[4]
    columns = torch.arange(segments.longest, dtype=torch.int32, device=segments.visible.device)
    return columns < segments.visible[:, None]


@operation(defined=_seen)
def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    *,
    key_format: IndexKeyFormat,
    workspace: int = 256 << 20,
) -> torch.Tensor:
    """Scores of every query against the tokens that it sees.

    Args:
        q: ``[T, heads, dim]`` rotated index queries; codes for a pool of codes.
        weights: ``[T, heads]`` float32 head weights, all scales included, those of q's codes too.
        pool: index-key pool ``[pages, page_size, columns]`` in ``key_format``, the queries' own keys stored.
        block_tables: ``[sequences, max_pages]`` int32.
        key_format: format of the pool, of q's dtype.
        workspace: bytes for the reference's intermediate products, besides the result; the kernels have none.

    Returns:
        float32 ``[T, segments.longest]``; of row t the first ``segments.visible[t]`` columns are defined.
    """
    check_indexer_arguments(q, weights, pool, block_tables, segments, key_format)
    if runs_triton(q):
        return _launch(q.contiguous(), weights.contiguous(), pool, block_tables, segments, key_format)
    tile_bytes = min(workspace, _CPU_TILE_BYTES) if q.device.type == "cpu" else workspace
    return indexer_scores_reference(q, weights, pool, block_tables, segments, key_format, tile_bytes)
