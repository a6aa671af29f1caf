"""The lightning indexer: which tokens each query attends to.

    positions[t] = the k positions s ≤ t with the highest score[t, s]

Scores live in a workspace of fixed size: queries are taken in as many blocks as it needs, so memory does not grow
with S².
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsa_engine.kernels.indexer_scores import indexer_scores
from dsa_engine.kernels.launch import runs_triton
from dsa_engine.kernels.segment import Segments
from dsa_engine.kernels.topk import select_topk


def lightning_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    k: int,
    *,
    workspace: int = 256 << 20,
) -> torch.Tensor:
    """Selects for every query the k best tokens that it sees.

    Args:
        q: ``[T, heads, dim]`` rotated index queries; float8_e4m3fn for an FP8 pool.
        weights: ``[T, heads]`` float32 head weights, all scales included; for FP8 the scales of q's rows too.
        pool: index-key pool ``[pages, page_size, columns]``: plain numbers in q's dtype, columns = dim; or FP8
            (:mod:`~dsa_engine.kernels.cache_format`).
        block_tables: ``[sequences, max_pages]`` int32.
        segments: of the queries.
        k: how many to select.
        workspace: bytes for scores and intermediate products.

    Returns:
        positions ``[T, k]`` int32, ascending, −1 behind the last where a query sees fewer than k tokens.
    """
    segments.check(q.shape[0], block_tables, pool.shape[1])
    positions = torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
    # The kernels need little beside the scores: the products never leave a program, and the selection's scratch is a
    # small part of what it reads. The references take a quarter of the workspace for the scores and half for the
    # products; the selection over the scores, when the products are gone, takes twice their bytes (and more in rows
    # full of ties).
    share = workspace * 3 // 4 if runs_triton(q) else workspace // 4
    for first, last in _pieces(segments, share // 4):
        # The whole keeps its tiles on the device for the next layer; a part makes its own.
        piece = segments if last - first == segments.rows else segments.part(first, last)
        rows = slice(first, last)
        scores = indexer_scores(q[rows], weights[rows], pool, block_tables, piece, workspace=workspace // 2)
        positions[rows] = select_topk(scores, k, piece.visible)[0]
        del scores  # before the next piece's are made
    return positions


def _pieces(segments: Segments, elements: int) -> Iterator[tuple[int, int]]:
    """Cuts the rows into pieces ``(first, last)`` whose scores, as wide as the most that any row of one sees, are at
    most ``elements`` numbers; a single row is always taken."""
    first = row = width = 0
    for s in segments:
        end = s.row + s.length
        while row < end:
            width = max(width, s.end)
            full = first + max(1, elements // width)
            row = max(row, min(end, full))
            if row >= full:
                yield first, row
                first, width = row, 0
    if first < row:
        yield first, row
