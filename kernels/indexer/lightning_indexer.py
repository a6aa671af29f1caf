"""The lightning indexer: which tokens each query attends to.

    slots[t] = the slots of the k positions s ≤ t with the highest score[t, s]

Scores live in a workspace of fixed size: queries are taken in as many blocks as it needs, so memory does not grow
with S².

On a CPU one kernel (``cpu/lightning_indexer.cpp``) does all of it and keeps no scores: each is compared, when it is
made, with the worst of its query's best so far.

Bits of a score, and so the choice between nearly equal ones: they depend on query and keys, and on whether few queries
or many are scored together (:mod:`.indexer_scores`); under :func:`.launch.batch_invariance` the CPU's kernel has one
form for all, to which FP8 is expanded. Ties go to the lowest position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.indexer._arguments import check_indexer_arguments
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.indexer.topk import check_candidates, select_topk
from dsa_engine.kernels.rows.segment import Paging, Segments, slots_of, slots_of_reference
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Queries of a tile on a CPU, which share the work of transposing keys; fewer where that leaves threads without a tile.
_MAX_QUERIES, _MIN_QUERIES = 128, 16
_TILE = 64  # rows that pieces are rounded to


def _selected(given: dict[str, Any], slots: torch.Tensor) -> list[torch.Tensor]:
    """float32 ``[T, tokens + 2]``: 1 for each visible token whose slot is selected; the last two columns are of −1 and
    of what is no such slot."""
    segments, count = given["segments"], given["segments"].longest
    positions = torch.arange(count, dtype=torch.int32, device=slots.device).expand(len(slots), -1)
    paging = Paging(given["block_tables"], segments.sequences, given["pool"].shape[1])
    tokens = slots_of_reference(positions, *paging).masked_fill_(positions >= segments.visible[:, None], -2)
    ordered = slots.sort(dim=1).values
    nearest = torch.searchsorted(ordered, tokens).clamp_(max=slots.shape[1] - 1)
    selected, empty = ordered.gather(1, nearest) == tokens, slots == -1
    known = selected.sum(dim=1) + empty.sum(dim=1)
    return [torch.cat((selected, empty.any(dim=1, keepdim=True), (known != slots.shape[1])[:, None]), dim=1).float()]


@operation(runs=cpu.serves, near_ties=_selected, waits=True)
def lightning_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    k: int,
    *,
    key_format: IndexKeyFormat,
    workspace: int = 256 << 20,
    finished: torch.Tensor | None = None,
    page_index: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Selects for every query the k best tokens that it sees.

    Args:
        q, weights, pool, block_tables, segments, key_format: as in :func:`.indexer_scores.indexer_scores`.
        k: number of tokens to select.
        workspace: bytes for scores and intermediate products.
        finished: :func:`.topk.no_row_finished`, if it is kept between calls.
        page_index, keys: where other ranks hold other pages of the sequences, and ``segments`` see local tokens: int32,
            shaped as the block tables, the number of each page in its sequence; and int64 ``[T, k]``, contiguous, which
            gets the candidate keys of the slots (:mod:`._candidates`).

    Returns:
        slots ``[T, k]`` int32, in ascending order of the tokens' positions, −1 after the last where a query sees fewer
        than k tokens.

    Raises:
        IndexError: on a CPU, pages of visible tokens outside of the pool.
    """
    check_indexer_arguments(q, weights, pool, block_tables, segments, key_format)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if keys is not None:
        check_candidates(keys, page_index, block_tables, q.shape[0], k)
    slots = torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
    if cpu.serves(q, pool) and cpu.serves(weights, dtype=torch.float32):
        given = (q.contiguous(), weights.contiguous(), pool, block_tables, segments, slots, workspace)
        _select_natively(*given, page_index, keys)
        return slots
    if is_batch_invariant() and keys is None and key_format.coded and cpu.serves(weights):
        _select_expanded(q.float(), weights, pool, block_tables, segments, key_format, slots, workspace)
        return slots
    # The kernels need little beside the scores: the products never leave a program, and the selection's scratch is a
    # small part of what it reads. The references take a quarter of the workspace for the scores and half for the
    # products; the selection over the scores, when the products are gone, takes twice their bytes (and more in rows
    # full of ties).
    score_bytes = workspace * 3 // 4 if runs_triton(q) else workspace // 4
    for first, last in _pieces(segments, score_bytes // 4):
        # The whole keeps its tiles on the device for the next layer; a part makes its own.
        piece = segments if last - first == segments.rows else segments.part(first, last)
        rows = slice(first, last)
        scores = indexer_scores(
            q[rows], weights[rows], pool, block_tables, piece, key_format=key_format, workspace=workspace // 2
        )
        paging = Paging(block_tables, piece.sequences, pool.shape[1])
        into: Any = {"out": slots[rows], "page_index": page_index, "keys": None if keys is None else keys[rows]}
        select_topk(scores, k, piece.visible, paging=paging, finished=finished, **into)
        del scores  # before the next piece's are made
    return slots


def _select_expanded(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    key_format: IndexKeyFormat,
    slots: torch.Tensor,
    workspace: int,
) -> None:
    """The same from a pool of codes: the pages of a segment are expanded to float32, in their order."""
    for s in segments:
        rows = slice(s.row, s.row + s.length)
        visible = segments.visible[rows]
        count = cdiv(int(visible.max()), pool.shape[1])
        pages = block_tables[segments.sequences[s.row], :count]
        keys = key_format.unpack(pool.index_select(0, pages))
        alone = Segments((s._replace(row=0, sequence=0),), torch.zeros_like(visible), visible)
        order = torch.arange(count, dtype=torch.int32)[None]
        _select_natively(q[rows], weights[rows].contiguous(), keys, order, alone, slots[rows], workspace)
    slots.copy_(slots_of(slots, block_tables, segments.sequences, pool.shape[1]))  # they were positions


def _select_natively(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    slots: torch.Tensor,
    workspace: int,
    page_index: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> None:
    """Fills ``slots [T, k]``, and ``keys``. Each thread has a tile's keys and best scores, of as many queries as fit in
    its part of the workspace; of one query at least."""
    (rows, heads, dim), k, type_ = q.shape, slots.shape[1], cpu.TYPES[q.dtype]
    library = cpu.kernels()
    threads = cpu.threads_for(heads * dim * sum(s.visible_pairs for s in segments))
    queries = min(_MAX_QUERIES, max(_MIN_QUERIES, cdiv(rows, 4 * threads)))
    while (
        queries > 1 and 4 * threads * library.dsa_lightning_indexer_scratch(queries, heads, dim, k, type_) > workspace
    ):
        queries //= 2
    tiles, tables = segments.tiles(queries), block_tables.int().contiguous()
    scratch = torch.empty(threads * library.dsa_lightning_indexer_scratch(queries, heads, dim, k, type_))
    index = None if page_index is None else page_index.contiguous()
    outside = library.dsa_lightning_indexer(
        q.data_ptr(), weights.data_ptr(), pool.data_ptr(), tables.data_ptr(), tiles.data_ptr(),
        segments.sequences.data_ptr(), segments.visible.data_ptr(), slots.data_ptr(),
        None if keys is None else keys.data_ptr(), None if index is None else index.data_ptr(), scratch.data_ptr(),
        type_,
        len(tiles), queries, len(pool), pool.stride(0), tables.stride(0), pool.shape[1], heads, dim, k,
        is_batch_invariant(), threads,
    )  # fmt: skip
    if outside:
        raise IndexError(f"the pages of visible tokens must be 0 to {len(pool) - 1}, the pages of the pool")


def _pieces(segments: Segments, elements: int) -> Iterator[tuple[int, int]]:
    """Cuts the rows into pieces ``(first, last)`` with at most ``elements`` scores, as wide as the row of a piece that
    sees most tokens; a piece has one row at least. Pieces of 64 rows or more end at whole tiles, so that the next one's
    tensors begin at 16 bytes: other addresses would be another variant of a kernel, to be compiled while serving."""
    first = row = width = 0
    for s in segments:
        end = s.row + s.length
        while row < end:
            width = max(width, s.end)
            full = first + max(1, elements // width)
            if full - first >= _TILE:
                full -= full % _TILE
            row = max(row, min(end, full))
            if row >= full:
                yield first, row
                first, width = row, 0
    if first < row:
        yield first, row
