"""Scores of the lightning indexer (DeepSeek-V3.2-Exp, equation 1).

    score[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])        s ≤ position of t, else −inf

Shapes: ``q [T, heads, dim]``, ``w [T, heads]`` float32 with every scale already in it, ``pool [pages, page_size,
dim]``; scores are float32 ``[T, S]``, S the most that any query sees. What lies behind a row's visible tokens is not
defined and must not be read.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.paged import read_rows
from dsa_engine.kernels.segment import Segments

# The per-head products of one tile on a CPU stay within a core's cache.
_CPU_TILE_BYTES = 4 << 20
_KEY_TILE = 1024


def indexer_scores_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    tile_bytes: int,
) -> torch.Tensor:
    scores = torch.empty(q.shape[0], segments.longest, dtype=torch.float32, device=q.device)
    for s in segments:
        rows = slice(s.row, s.row + s.length)
        _score_segment(
            q[rows], weights[rows], pool, block_tables[s.sequence], s.start, tile_bytes, scores[rows, : s.end]
        )
    return scores


def _score_segment(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
    tile_bytes: int,
    scores: torch.Tensor,
) -> None:
    """``scores [n, start + n]`` of the n queries of one segment."""
    count, heads, _ = q.shape
    end = start + count
    q, weights = q.float(), weights.float().unsqueeze(1)
    rows = min(count, max(1, tile_bytes // (4 * heads * _KEY_TILE)))
    buffer = q.new_empty(
        rows * heads * min(_KEY_TILE, end)
    )  # reused: fresh pages for every tile cost more than the product
    for first_key in range(0, end, _KEY_TILE):
        last_key = min(first_key + _KEY_TILE, end)
        keys = read_rows(pool, block_table, first_key, last_key).float().t()
        # Queries before this tile of keys see none of it.
        for row in range(max(0, first_key - start) // rows * rows, count, rows):
            tile = slice(row, min(row + rows, count))
            queries = q[tile].flatten(0, 1)
            products = buffer[: queries.shape[0] * keys.shape[1]].view(queries.shape[0], keys.shape[1])
            torch.mm(queries, keys, out=products).relu_()
            torch.bmm(
                weights[tile], products.view(-1, heads, keys.shape[1]), out=scores[tile, None, first_key:last_key]
            )


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    *,
    workspace: int = 256 << 20,
) -> torch.Tensor:
    """Scores of every query against the tokens that it sees.

    Args:
        q: ``[T, heads, dim]`` rotated index queries.
        weights: ``[T, heads]`` float32 head weights, all scales included.
        pool: index-key pool ``[pages, page_size, dim]``, the queries' own keys stored.
        block_tables: ``[sequences, max_pages]`` int32.
        segments: the runs of queries.
        workspace: bytes for the reference's intermediate products, besides the result.

    Returns:
        float32 ``[T, segments.longest]``; of row t the first ``segments.visible[t]`` columns are defined.
    """
    if q.shape[:2] != weights.shape or q.shape[-1] != pool.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, weights {tuple(weights.shape)} and pool {tuple(pool.shape)} do not fit together"
        )
    segments.check(q.shape[0], block_tables, pool.shape[1])
    tile_bytes = min(workspace, _CPU_TILE_BYTES) if q.device.type == "cpu" else workspace
    return indexer_scores_reference(q, weights, pool, block_tables, segments, tile_bytes)
