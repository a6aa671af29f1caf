"""Scores of the lightning indexer (DeepSeek-V3.2-Exp, equation 1).

    score[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])        s ≤ position of t, else −inf

Shapes: ``q [n, heads, dim]``, ``w [n, heads]`` float32 with every scale already in it, ``pool [pages, page_size,
dim]``; scores are float32 ``[n, start + n]`` for the n queries of one segment.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.paged import read_rows

# The per-head products of one tile on a CPU stay within a core's cache.
_CPU_TILE_BYTES = 4 << 20
_KEY_TILE = 1024


def indexer_scores_reference(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_table: torch.Tensor, start: int, tile_bytes: int
) -> torch.Tensor:
    count, heads, _ = q.shape
    end = start + count
    scores = torch.empty(count, end, dtype=torch.float32, device=q.device)
    q, weights = q.float(), weights.float().unsqueeze(1)
    rows = min(count, max(1, tile_bytes // (4 * heads * _KEY_TILE)))
    buffer = q.new_empty(
        rows * heads * min(_KEY_TILE, end)
    )  # reused: fresh pages for every tile cost more than the product
    for first_key in range(0, end, _KEY_TILE):
        last_key = min(first_key + _KEY_TILE, end)
        keys = read_rows(pool, block_table, first_key, last_key).float().t()
        # Queries before this tile of keys see none of it: their part is overwritten by the mask below.
        for row in range(max(0, first_key - start) // rows * rows, count, rows):
            tile = slice(row, min(row + rows, count))
            queries = q[tile].flatten(0, 1)
            products = buffer[: queries.shape[0] * keys.shape[1]].view(queries.shape[0], keys.shape[1])
            torch.mm(queries, keys, out=products).relu_()
            torch.bmm(
                weights[tile], products.view(-1, heads, keys.shape[1]), out=scores[tile, None, first_key:last_key]
            )
    future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
    scores[:, start:].masked_fill_(future, float("-inf"))
    return scores


def indexer_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
    *,
    workspace: int = 256 << 20,
) -> torch.Tensor:
    """Scores of one segment's queries, at positions ``start …``, against every token that they may see.

    Args:
        q: ``[n, heads, dim]`` rotated index queries.
        weights: ``[n, heads]`` head weights, all scales included.
        pool: index-key pool ``[pages, page_size, dim]``, the queries' own keys stored.
        block_table: ``[max_pages]`` int32, the sequence's pages.
        start: position of the first query.
        workspace: bytes for intermediate products, besides the result.

    Returns:
        float32 ``[n, start + n]``; −inf where the key lies after the query.
    """
    if q.shape[:2] != weights.shape or q.shape[-1] != pool.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, weights {tuple(weights.shape)} and pool {tuple(pool.shape)} do not fit together"
        )
    tile_bytes = min(workspace, _CPU_TILE_BYTES) if q.device.type == "cpu" else workspace
    return indexer_scores_reference(q, weights, pool, block_table, start, tile_bytes)
