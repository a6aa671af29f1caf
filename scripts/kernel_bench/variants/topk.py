"""Scores and top-k in one launch, which begins at the last step's threshold; for the few rows of decode.

Consecutive steps choose nearly the same tokens: about 1.2 k scores are above a floor a little below the k-th of the
step before. Each program of the scores keeps those of its keys, in order of position, and the last program of a row
selects among all: exactly. Where the floor misleads, it finds another in a sample and sweeps the row once; where that
one does too, it reads the row at each step of the selection. So no result depends on floors.

Expected, not measured (H100, 1 row of 131,072): 18 us, not 10 (scores) + 26; 90 us where a floor misleads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.indexer._candidates import score_order
from dsa_engine.kernels.indexer._score_kernels import score_span_kernel
from dsa_engine.kernels.indexer._topk_spans_kernel import MINUS_INF, _finish, _row_keys, _sampled_floor
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.indexer.topk import no_row_finished
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from kernel_cases.inputs import INDEX_DIM, PAGE_SIZE, TOPK, Inputs, KernelCase, Sizes

KEYS = index_key_format(INDEX_DIM, FP8)
PAGE = tl.constexpr(PAGE_SIZE)
NONE = tl.constexpr(MINUS_INF.value << 32)  # no candidate; one is a key, and a position in the lower 32 bits


@kernel
def scores_and_topk_kernel(
    q, weights, keys, key_scales, tables, tiles, sequences, visible, scores, table_stride, page_stride, scale_stride,
    score_stride, floors, candidates, held, chosen, finished, slots, next_floors,
    FORMAT: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Grid ``(spans, rows)``. ``candidates [rows, SPANS, SPAN]``, ``held [rows, 2, SPANS]``, ``chosen [rows, ROOM]``:
    memory. Floors are keys (`_topk_spans_kernel.py`). K is at most half of ROOM."""
    score_span_kernel(
        q, weights, keys, key_scales, tables, tiles, sequences, visible, scores,
        table_stride, page_stride, scale_stride, score_stride, SPAN, FORMAT, 64, 128, PAGE, "tf32", 64, 128, 128, 1, 3,
    )  # fmt: skip
    span, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(visible + row)
    spans = tl.maximum(tl.cdiv(length, SPAN), 1)
    if span >= spans:
        return
    tl.debug_barrier()  # the scores are stored
    scores, candidates, held = scores + row * score_stride, candidates + row * SPANS * SPAN, held + row * SPANS * 2
    chosen, slots = chosen + row * ROOM, slots + row * K
    floor = tl.load(floors + row)
    count = _keep(scores, span * SPAN, length, floor, candidates + span * SPAN, 0, SPAN, SPAN)
    padding = count + tl.arange(0, 4)  # candidates lie in groups of 4
    tl.store(candidates + span * SPAN + padding, NONE, mask=padding < tl.cdiv(count, 4) * 4)
    tl.store(held + span, count)
    tl.debug_barrier()  # one thread counts, after the stores of all
    # It acquires and releases: the last program sees what all others have stored.
    if tl.atomic_add(finished + row, 1, sem="acq_rel", scope="gpu") < spans - 1:
        return
    tl.store(finished + row, 0)  # for the next selection
    number, group, item = tl.arange(0, SPANS), tl.arange(0, ROOM // 4), tl.arange(0, ROOM)
    counts = tl.load(held + number, mask=number < spans, other=0)
    until = tl.cumsum(tl.cdiv(counts, 4))
    total, size = tl.sum(counts), 4 * tl.max(until)
    fits = (size <= ROOM) & ((total >= K) | (floor == MINUS_INF))
    if fits:
        tl.store(held + SPANS + number, until)
        tl.debug_barrier()  # they are stored
        owner, step = group * 0, total * 0 + SPANS // 2
        while step > 0:  # a group's span is the first that goes on after it
            owner += tl.where(tl.load(held + SPANS + owner + step - 1) <= group, step, 0)
            step >>= 1
        at = owner * SPAN + 4 * (group - tl.load(held + SPANS + owner - 1, mask=owner > 0, other=0))
        there = tl.broadcast_to((4 * group < size)[:, None], ROOM // 4, 4)
        candidate = tl.load(candidates + at[:, None] + tl.arange(0, 4)[None, :], mask=there, other=NONE)
        candidate = tl.reshape(candidate, [ROOM])
        tl.store(chosen + item, candidate)
        order = (candidate >> 32).to(tl.int32)
    else:
        floor = tl.full([], MINUS_INF, tl.int32)
        if length > 4 * ROOM:
            floor = _sampled_floor(scores, length, K + K // 3, ROOM)
        size *= 0
        for first in range(0, length, ROOM // 2):
            size += _keep(scores, first, length, floor, chosen, size, ROOM, ROOM // 2)
        fits = (size <= ROOM) & ((size >= K) | (floor == MINUS_INF))
        tl.debug_barrier()  # they are stored
        order = (tl.load(chosen + item, mask=item < size, other=NONE) >> 32).to(tl.int32)
    order = tl.where(order > MINUS_INF, order - floor + MINUS_INF, MINUS_INF)  # the halving begins at the floor
    if not fits:
        order, size = _row_keys(scores, 0, length, ROOM), length
    one = tl.full([], 1, tl.int32)
    done = _finish(scores, order, held, held, held, one, size, floor, K, slots, tables, 0, ROOM, ROOM // 2)
    tl.debug_barrier()  # the places in `chosen`, or in the row, of the best are stored
    entry = tl.arange(0, ROOM // 2)
    there = entry < done
    position = tl.load(slots + entry, mask=there, other=0)
    if fits:
        best = tl.load(chosen + position, mask=there, other=0)
        key, position = (best >> 32).to(tl.int32), best.to(tl.int32)
    else:
        key = score_order(tl.load(scores + position, mask=there, other=0.0))
    table = tables + tl.load(sequences + row).to(tl.int64) * table_stride
    page = tl.load(table + position // PAGE, mask=there, other=0)
    tl.debug_barrier()  # all threads have read their places
    tl.store(slots + entry, tl.where(there, page * PAGE + position % PAGE, -1), mask=entry < K)
    # 1/32 of the way from the k-th key to the best: of 131,072 normal scores 1.2 k are above.
    lowest, highest = tl.min(tl.where(there, key, 0x7FFFFFFF)), tl.max(tl.where(there, key, MINUS_INF))
    lowered = tl.maximum(lowest, MINUS_INF + (1 << 27)) - (highest // 32 - lowest // 32)  # within int32
    tl.store(next_floors + row, tl.where(done == K, lowered, MINUS_INF))


@triton.jit
def _keep(scores, first, length, floor, into, before, ROOM: tl.constexpr, SPAN: tl.constexpr):
    """Stores what is above the floor among SPAN scores, after ``before`` others, and returns how many these are."""
    keys = _row_keys(scores, first, length, SPAN)
    wanted = (keys > floor).to(tl.int32)
    goal = before + tl.cumsum(wanted) - 1
    candidate = (keys.to(tl.int64) << 32) | (first + tl.arange(0, SPAN))
    tl.store(into + goal, candidate, mask=(wanted > 0) & (goal < ROOM))
    return tl.sum(wanted)


def scores_and_topk(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, segments: Segments, k: int,
    finished: torch.Tensor, floors: torch.Tensor, span: int = 512, room: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The slots of :func:`.lightning_indexer` for a row of each sequence, with 64 heads and pages of 64 FP8 keys; and
    the next step's floors, which the reference leaves as they are. ``finished [R]``: zeros, also afterwards."""
    if not launch.runs_triton(q):
        return lightning_indexer(q, weights, pool, tables, segments, k, key_format=KEYS), floors
    rows, (keys, key_scales), spans = len(q), KEYS.views(pool), next_power_of_2(cdiv(segments.longest, span))
    q, keys = KEYS.operands(q, keys, launch.chip_of(q))
    scores = weights.new_empty(rows, cdiv(segments.longest, 16) * 16)
    candidates, chosen = (floors.new_empty(rows, n, dtype=torch.int64) for n in (spans * span, room))
    held, slots, next_floors = floors.new_empty(rows, 2, spans), floors.new_empty(rows, k), torch.empty_like(floors)
    scores_and_topk_kernel[(cdiv(segments.longest, span), rows)](
        q, weights, keys, key_scales, tables, segments.tiles(1), segments.sequences, segments.visible, scores,
        tables.stride(0), keys.stride(0), 0 if key_scales is None else key_scales.stride(0), scores.stride(0),
        floors, candidates, held, chosen, finished, slots, next_floors,
        FORMAT=KEYS.helpers, K=k, SPAN=span, SPANS=spans, ROOM=room, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return slots, next_floors


def variant_topk(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """The floors are those of the same keys and of the queries with a tenth of noise added, before both are rounded."""
    context = sizes.contexts[-1]
    for rows in (1, 4, 8):
        tables, pages = make.block_tables(rows, context)
        q, weights, pool = make.normal(rows, 64, INDEX_DIM), make.floats(rows, 64), make.pool(pages, KEYS)
        given = weights, pool, tables, make.decode(rows, context), min(TOPK, context)
        finished, none = no_row_finished(make.device), torch.full_like(tables[:, 0], MINUS_INF.value)
        before = q + make.normal(*q.shape) / 10
        floors = scores_and_topk(before.to(FP8), *given, finished, none)[1]
        today = partial(lightning_indexer, q.to(FP8), *given, key_format=KEYS, finished=finished)
        for name, its in (("", floors), (", no floor", none)):
            yield KernelCase(
                "scores and top-k, one launch" + name,
                f"{rows} rows, 64 heads, k {given[-1]}, S {context:,}",
                partial(scores_and_topk, q.to(FP8), *given, finished, its),
                bytes=pool.nbytes + 4 * rows * context,
                baselines={"scores, then top-k": today},
            )
