"""The selection of few rows, in one launch: a row is cut into spans of fixed length, a program each.

    floor     every program finds the same one in the same sample: about 2 to 3 times k scores of the row are above it
    span      a program's scores above the floor become candidates, in order of position, in memory of its own
    finish    the last program of a row to get so far selects among the candidates of all: exactly, already in order

No program waits for another. A span's scores are loaded once, together, and stay in registers, as do a row's candidates
while they are selected. If these are too many for that (equal scores), or too few (the sample misled), the last program
reads the row itself at each step: no result depends on the sample. The k-th best is found by halving: a step is a
comparison and an addition for each of a thread's scores, and a sum over threads. As Triton makes a histogram, by 8
votes of a warp for each score and more, 8 bits of one would take longer than 8 steps.

Scores become *keys*, integers in their order: −0 and +0 have the key 0, NaN of either sign the greatest. Candidates are
stored in groups of GROUP, the last of a span filled up, so that the memory of a whole group is found at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_engine.kernels.indexer._candidates import finish_candidates, score_order
from dsa_engine.kernels.runtime.kernel import kernel

MINUS_INF = tl.constexpr(-2139095041)
GROUP = tl.constexpr(16)


@triton.jit
def _row_keys(row, first, length, SPAN: tl.constexpr):
    """Keys of the scores ``first … first + SPAN - 1`` of a row, −inf after its last; no mask within a whole span, as it
    would split the loads."""
    slots = first + tl.arange(0, SPAN)
    if first + SPAN <= length:
        scores = tl.load(row + slots)
    else:
        scores = tl.load(row + slots, mask=slots < length, other=float("-inf"))
    return score_order(scores)


@triton.jit
def _sampled_floor(row, length, aim, SAMPLE: tl.constexpr):
    """A key that about ``aim`` scores of the row are above, or a quarter more; more if scores at it are equal. The
    sample is runs of 4 from all over the row."""
    runs = tl.arange(0, SAMPLE // 4)
    at = runs * (length // 4) // (SAMPLE // 4) * 4
    keys = tl.reshape(score_order(tl.load(row + at[:, None] + tl.arange(0, 4)[None, :])), [SAMPLE])
    rank = (aim * (SAMPLE * 1.0) / length).to(tl.int32) + 1
    low, high = tl.full([], MINUS_INF, tl.int32), tl.maximum(tl.max(keys), -1)
    count = tl.full([], SAMPLE, tl.int32)
    while (count > rank + rank // 4) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        above = tl.sum((keys > middle).to(tl.int32))
        low, count = tl.where(above >= rank, middle, low), tl.where(above >= rank, above, count)
        high = tl.where(above >= rank, high, middle)
    return low


# These change from step to step and are no addresses: one compiled kernel serves all.
@kernel(do_not_specialize=["width", "aim", "table_stride", "index_stride"])
def select_topk_spans_kernel(
    scores, lengths, keys, columns, held, finished, positions, counts, tables, sequences, page_index, candidates,
    width, row_stride, k, aim, table_stride, index_stride,
    HAS_LENGTHS: tl.constexpr, PAGE_SIZE: tl.constexpr, SPAN: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Grid ``(spans, rows)``. ``keys``, ``columns [rows, spans, SPAN / 2]`` and ``held [rows, spans]``: memory of the
    candidates; ``finished [rows]`` counts a row's programs that are through: zeros before, and again after."""
    CAPACITY: tl.constexpr = SPAN // 2
    row = tl.program_id(1).to(tl.int64)
    length = width
    if HAS_LENGTHS:
        length = tl.minimum(width, tl.load(lengths + row).to(tl.int32))
    spans, span = tl.maximum(tl.cdiv(length, SPAN), 1), tl.program_id(0)
    if span < spans:
        scores += row * row_stride
        keys += row * tl.num_programs(0) * CAPACITY
        columns += row * tl.num_programs(0) * CAPACITY
        held += row * tl.num_programs(0)
        values = _row_keys(scores, span * SPAN, length, SPAN)
        floor = tl.full([], MINUS_INF, tl.int32)
        through = span
        if spans > 1:
            floor = _sampled_floor(scores, length, aim, SAMPLE)
            wanted = values > floor
            goal = tl.cumsum(wanted.to(tl.int32)) - 1
            stored = wanted & (goal < CAPACITY)
            # Untrue, and harmless in an address (see _topk_kernel.py); a comparison would be made once for four.
            goal = tl.max_contiguous(tl.multiple_of(goal, 4), 4)
            tl.store(keys + span * CAPACITY + goal, values, mask=stored)
            tl.store(columns + span * CAPACITY + goal, span * SPAN + tl.arange(0, SPAN), mask=stored)
            count = tl.sum(wanted.to(tl.int32))
            padding = count + tl.arange(0, GROUP)
            padded = tl.minimum(tl.cdiv(count, GROUP) * GROUP, CAPACITY)
            tl.store(keys + span * CAPACITY + padding, MINUS_INF, mask=padding < padded)
            tl.store(held + span, count)
            tl.debug_barrier()  # one thread counts, after the stores of all
            # It acquires and releases: the last program sees what all others have stored.
            through = tl.atomic_add(finished + row, 1, sem="acq_rel", scope="gpu")
        if through == spans - 1:
            tl.store(finished + row, 0)  # for the next selection
            table = tables
            if PAGE_SIZE > 0:
                table = tables + tl.load(sequences + row).to(tl.int64) * table_stride
            done = _finish(
                scores, values, keys, columns, held, spans, length, floor, k, positions + row * k, table,
                PAGE_SIZE if candidates is None else 0, SPAN, CAPACITY,
            )  # fmt: skip
            if candidates is not None:
                index = page_index + tl.load(sequences + row).to(tl.int64) * index_stride
                out, into = positions + row * k, candidates + row * k
                finish_candidates(scores, out, into, table, index, done, k, PAGE_SIZE, SPAN // 4)
            else:
                for first in range(0, k, SPAN):
                    slots = first + tl.arange(0, SPAN)
                    tl.store(positions + row * k + slots, -1, mask=(slots >= done) & (slots < k))
            tl.store(counts + row, done)


@triton.jit
def _finish(
    row, values, keys, columns, held, spans, length, floor, k, out, table,
    PAGE_SIZE: tl.constexpr, SPAN: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Stores the positions, or slots, of a row's k best, and returns how many there are; ``values`` are its keys if
    they fit in a span."""
    # Where candidates are: their groups one after another, span by span.
    groups = tl.arange(0, SPAN // GROUP)
    at, end, total, longest = groups, spans * 0, spans * 0, spans * 0
    for span in range(tl.where(spans > 1, spans, 0)):
        count = tl.load(held + span)
        total, longest = total + count, tl.maximum(longest, count)
        end += tl.cdiv(count, GROUP)
        at += tl.where(groups >= end, CAPACITY // GROUP - tl.cdiv(count, GROUP), 0)
    few = (total >= k) & (end <= SPAN // GROUP) & (longest <= CAPACITY)
    at = tl.reshape(at[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [SPAN])
    if few:
        there = tl.broadcast_to((groups < end)[:, None], SPAN // GROUP, GROUP)
        values = tl.load(keys + at, mask=tl.reshape(there, [SPAN]), other=MINUS_INF)
        length = total * 0
    elif spans > 1:
        values = _row_keys(row, 0, length, SPAN)
    low = tl.where(total >= k, floor, MINUS_INF)
    # At least k keys are above low, or all; fewer than k above high.
    at_low, at_high = tl.sum((values > low).to(tl.int32)), total * 0
    high = tl.max(values)
    for first in range(SPAN, length, SPAN):
        others = _row_keys(row, first, length, SPAN)
        at_low, high = at_low + tl.sum((others > low).to(tl.int32)), tl.maximum(high, tl.max(others))
    high = tl.maximum(high, low + 1)
    middle = low + 1  # if many scores equal the floor, one step will do
    if few | (low == MINUS_INF):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
    while (at_low > k) & (high > low + 1):
        count = tl.sum((values > middle).to(tl.int32))
        for first in range(SPAN, length, SPAN):
            count += tl.sum((_row_keys(row, first, length, SPAN) > middle).to(tl.int32))
        low, at_low = tl.where(count >= k, middle, low), tl.where(count >= k, count, at_low)
        high, at_high = tl.where(count >= k, high, middle), tl.where(count >= k, at_high, count)
        middle = (low & high) + ((low ^ high) >> 1)
    # If more than k are above low, all above low and not above high are equal.
    tied = at_low > k
    line, ties = tl.where(tied, high, low), tl.where(tied, k - at_high, 0)
    done = total * 0
    for first in range(0, tl.maximum(length, 1), SPAN):
        if first > 0:
            values = _row_keys(row, first, length, SPAN)
        above = values > line
        level = (values > low) & ~above
        both = above.to(tl.int32) + (level.to(tl.int32) << 16)
        before = tl.cumsum(both) - both
        levels = before >> 16
        selected = above | (level & (levels < ties))
        goal = done + (before & 0xFFFF) + tl.minimum(levels, ties)
        goal = tl.max_contiguous(tl.multiple_of(goal, 4), 4)  # untrue
        positions = first + tl.arange(0, SPAN)
        if few:
            positions = tl.load(columns + at, mask=selected)
        if PAGE_SIZE > 0:
            page_of = (positions.to(tl.uint32) // PAGE_SIZE).to(tl.int32)  # unsigned: fewer instructions
            page = tl.load(table + page_of, mask=selected)
            positions += ((page - page_of) * PAGE_SIZE).to(tl.int32)
        tl.store(out + goal, positions, mask=selected)
        added = tl.sum(both)
        taken = tl.minimum(added >> 16, ties)
        done += (added & 0xFFFF) + taken
        ties -= taken
    return done
