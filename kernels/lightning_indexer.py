"""The lightning indexer: which tokens each query attends to.

    positions[t] = the k positions s ≤ t with the highest score[t, s]

Scores live in a workspace of fixed size: queries are taken in as many blocks as it needs, so memory does not grow
with S².
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.kernels.indexer_scores import indexer_scores
from dsa_engine.kernels.segment import Segment, check_segments
from dsa_engine.kernels.topk import select_topk


def lightning_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Sequence[Segment],
    k: int,
    *,
    workspace: int = 256 << 20,
) -> torch.Tensor:
    """Selects for every query the k best tokens that it sees.

    Args:
        q: ``[T, heads, dim]`` rotated index queries.
        weights: ``[T, heads]`` float32 head weights, all scales included.
        pool: index-key pool ``[pages, page_size, dim]``.
        block_tables: ``[sequences, max_pages]`` int32.
        segments: the runs of queries; together they cover the T rows.
        k: how many to select.
        workspace: bytes for scores and intermediate products.

    Returns:
        positions ``[T, k]`` int32, ascending, −1 behind the last where a query sees fewer than k tokens.
    """
    check_segments(segments, q.shape[0], block_tables, pool.shape[1])
    positions = torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
    for segment in segments:
        # A quarter of the workspace for the scores, half for the products; the selection over the scores, when the
        # products are gone, takes twice their bytes (and more in rows full of ties).
        block = max(1, workspace // 4 // (4 * segment.end))
        for done in range(0, segment.length, block):
            rows = slice(segment.row + done, segment.row + min(done + block, segment.length))
            scores = indexer_scores(
                q[rows],
                weights[rows],
                pool,
                block_tables[segment.sequence],
                segment.start + done,
                workspace=workspace // 2,
            )
            positions[rows] = select_topk(scores, k)[0]
            del scores  # before the next block's are made
    return positions
