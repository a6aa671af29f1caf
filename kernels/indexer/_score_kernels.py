"""The kernels of the indexer scores.

Two kernels do the same in opposite order: with many queries per sequence (prefill) a program keeps a tile of keys and
queries stream past, with one or two (decode) it keeps the queries and keys stream past. In both, keys are the rows and
heads, of one or two queries, the columns of a product: a thread holds few keys and many heads, and the sum over heads
hardly leaves it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_engine.kernels.runtime.kernel import kernel


@triton.jit
def _load_rows(rows, exist, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """The rows at the pointers ``rows``."""
    column = tl.arange(0, BLOCK_DIM)
    values = tl.load(rows[:, None] + column[None, :], mask=exist[:, None] & (column < DIM)[None, :], other=0.0)
    return FORMAT.operand(values)


@triton.jit
def _store_sums(products, w, key_scale, line, line_stride, exists, second_exists, QUERIES: tl.constexpr):
    """Weighs the products ``[keys, queries · heads]``, sums them over heads and stores the scores of one query at
    ``line [keys]``, of a second one a stride later."""
    weighted = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
    if QUERIES == 1:
        first = tl.sum(weighted, axis=1)
    else:
        by_query = tl.reshape(weighted, (products.shape[0], 2, products.shape[1] // 2))
        first, second = tl.split(tl.sum(by_query, axis=2))
        if key_scale is not None:
            second *= key_scale
        # Two stores: the exchange between threads before each then takes half the shared memory of one.
        tl.store(line + line_stride, second, mask=exists & second_exists)
    if key_scale is not None:
        first *= key_scale
    tl.store(line, first, mask=exists)


@kernel
def score_tile_kernel(
    q, weights, keys, key_scales, block_tables, tiles, sequences, visible, scores,
    table_stride, page_stride, scale_stride, score_stride,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One tile of keys against one tile of queries, QUERIES at a time. No accumulator outlives a step."""
    # The keys' axis is the fast one: all programs that run together read the same queries, the operand that streams,
    # and each reads its keys once. Last tiles first: in a causal batch they tend to see more tokens.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = tl.load(tiles + 2 * tile).to(tl.int64)
    count = tl.load(tiles + 2 * tile + 1)
    seen = tl.load(visible + row)
    first_key = tl.program_id(0) * BLOCK_KEYS
    # The first query that sees one of these keys.
    begin = tl.maximum(first_key + 1 - seen, 0)
    if begin >= count:
        return
    position = first_key + tl.arange(0, BLOCK_KEYS)
    # Rows of which not each sees one more (the pages lie on several ranks) see fewer, at the end of the scores too.
    exists = position < tl.minimum(seen + count - 1, score_stride)
    table = block_tables + tl.load(sequences + row).to(tl.int64) * table_stride
    page = tl.load(table + position // PAGE_SIZE, mask=exists, other=0).to(tl.int64)
    offset = position % PAGE_SIZE
    tile_keys = _load_rows(keys + page * page_stride + offset * DIM, exists, DIM, BLOCK_DIM, FORMAT)
    if key_scales is not None:
        key_scales = tl.load(key_scales + page * scale_stride + offset, mask=exists, other=0.0)
    lane = tl.arange(0, QUERIES * BLOCK_HEADS)
    query = lane // BLOCK_HEADS
    head = lane % BLOCK_HEADS
    q += row * HEADS * DIM
    weights += row * HEADS
    # The launch sets the number of stages: set here, the loop would stage the weights too, and two programs would not
    # fit.
    for i in tl.range(begin, count, QUERIES):
        known = (i + query < count) & (head < HEADS)
        line = (i + query) * HEADS + head
        queries = _load_rows(q + line * DIM, known, DIM, BLOCK_DIM, FORMAT)
        w = tl.load(weights + line, mask=known, other=0.0)  # before the product, which covers its latency
        products = tl.dot(tile_keys, tl.trans(queries), input_precision=PRECISION)
        line_scores = scores + (row + i) * score_stride + position
        _store_sums(products, w, key_scales, line_scores, score_stride, exists, i + 1 < count, QUERIES)


@kernel
def score_span_kernel(
    q, weights, keys, key_scales, block_tables, tiles, sequences, visible, scores,
    table_stride, page_stride, scale_stride, score_stride, span,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, QUERIES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``span`` keys of one sequence against the QUERIES queries, or fewer, of one tile."""
    tile = tl.program_id(1)
    row = tl.load(tiles + 2 * tile).to(tl.int64)
    count = tl.load(tiles + 2 * tile + 1)
    begin = tl.program_id(0) * span
    # Not beyond the row's scores, as in `score_tile_kernel`.
    stop = tl.minimum(begin + span, tl.minimum(tl.load(visible + row) + count - 1, score_stride))
    if begin >= stop:
        return
    lane = tl.arange(0, QUERIES * BLOCK_HEADS)
    query = lane // BLOCK_HEADS
    head = lane % BLOCK_HEADS
    known = (query < count) & (head < HEADS)
    line = row * HEADS + query * HEADS + head
    queries = _load_rows(q + line * DIM, known, DIM, BLOCK_DIM, FORMAT)
    w = tl.load(weights + line, mask=known, other=0.0)
    scores += row * score_stride
    table = block_tables + tl.load(sequences + row).to(tl.int64) * table_stride
    key = tl.arange(0, BLOCK_KEYS)
    page = tl.load(table + (begin + key) // PAGE_SIZE, mask=begin + key < stop, other=0)
    for first in tl.range(begin, stop, BLOCK_KEYS, num_stages=STAGES):
        position = first + key
        exists = position < stop
        # Page numbers are read a step ahead: addresses are there when loads are issued. Carried as int32, since Triton
        # pipelines the loads in another, worse form around a conversion.
        ahead = position + BLOCK_KEYS
        next_page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < stop, other=0)
        here = page.to(tl.int64)
        offset = position % PAGE_SIZE
        tile_keys = _load_rows(keys + here * page_stride + offset * DIM, exists, DIM, BLOCK_DIM, FORMAT)
        key_scale = None
        if key_scales is not None:
            key_scale = tl.load(key_scales + here * scale_stride + offset, mask=exists, other=0.0)
        products = tl.dot(tile_keys, tl.trans(queries), input_precision=PRECISION)
        _store_sums(products, w, key_scale, scores + position, score_stride, exists, count > 1, QUERIES)
        page = next_page
