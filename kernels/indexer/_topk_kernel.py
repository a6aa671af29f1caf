"""The selection's kernel: one program takes a row and reads its scores once, from left to right.

    guess       a sample from all over the row gives a floor that a few more than k scores are probably above
    stage       groups of 4 scores, of which at least one is above the floor, are set aside
    flush       when many are staged, their scores above the floor join the candidates, in order of position
    cut         when the candidates fill their buffer, all but the k best (or a few more) go, and the floor rises
    cut         at the end again, to k exactly: the result, already in order of position

Only *stage* works on every score, and it is cheap: a 16-byte load for four, a comparison each, and a prefix sum over
one number a thread. A floor guessed too high, so that fewer than k scores were above it, is noticed at the end, and the
row is read again without a guess: no result depends on it.

Scores are compared as numbers, so that −0 equals +0, by ``not score <= floor``, so that NaN is above everything. The
search for the k-th best halves a range of *keys*: integers in the order of the numbers whose bits they are made of. A
*line* is a key that separates the scores above it from the rest. Zero has the key −1 (0, the other zero, acts alike).
Rows are read forward: a score that equals the worst of k candidates comes too late, which is the rule for ties.

Buffers lie in global memory and stay in the caches; a barrier separates the stores of one thread from the loads of
another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsa_engine.kernels.indexer._candidates import finish_candidates
from dsa_engine.kernels.runtime.kernel import kernel

MINUS_INF = tl.constexpr(-2139095041)  # keys
NAN = tl.constexpr(0x7F800001)


@triton.jit
def _above(scores, line):
    """Whether scores are above a line, the key of any number but NaN."""
    return ~(scores <= (line ^ ((line >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit
def _find_line(scores, held, floor, k, max_kept, PIECE: tl.constexpr):
    """Keys low < high: at least k of the held scores are above low, fewer than k above high. Ends when no more than
    ``max_kept`` are above low, or when no key lies between. All held scores are above ``floor - 1``, and the last piece
    is filled up with −inf. Returns low, the number above it, high, and the number above that."""
    slots = tl.arange(0, PIECE)
    peak = tl.full([PIECE], -(2**31), tl.int32)
    for first in range(0, held, PIECE):
        peak = tl.maximum(peak, tl.load(scores + first + slots).to(tl.int32, bitcast=True))
    # The bits of a number that is not negative are its key; if all are negative, all are below zero.
    high = tl.minimum(tl.maximum(tl.max(peak), -1), NAN)
    low, at_low, at_high = tl.maximum(floor - 1, MINUS_INF), held, held * 0
    while (at_low > max_kept) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        counts = tl.zeros([PIECE], tl.int32)
        for first in range(0, held, PIECE):
            counts += _above(tl.load(scores + first + slots), middle).to(tl.int32)
        count = tl.sum(counts)
        enough = count >= k
        low, at_low = tl.where(enough, middle, low), tl.where(enough, count, at_low)
        high, at_high = tl.where(enough, high, middle), tl.where(enough, at_high, count)
    return low, at_low, high, at_high


@triton.jit
def _cut(
    scores, columns, held, floor, k, max_kept, out_scores, out_columns, table,
    KEEP_SCORES: tl.constexpr, PAGE_SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Copies the best of the held candidates, in order: k to ``max_kept`` of them, exactly k where ties decide, all if
    they are no more. They may be copied over themselves. With a PAGE_SIZE, their slots are stored instead of their
    positions, by the table of a sequence's pages. Returns their number, and the floor that they set."""
    slots = tl.arange(0, PIECE)
    tl.debug_barrier()  # the candidates are stored
    padding = held + slots
    tl.store(scores + padding, float("-inf"), mask=padding < (held + PIECE - 1) // PIECE * PIECE)
    tl.debug_barrier()
    low, at_low, high, at_high = _find_line(scores, held, floor, k, max_kept, PIECE)
    tied = at_low > max_kept  # then all scores above low and not above high are equal
    line, ties = tl.where(tied, high, low), tl.where(tied, k - at_high, 0)
    done = held * 0
    for first in range(0, held, PIECE):
        values = tl.load(scores + first + slots)
        positions_of = tl.load(columns + first + slots)
        above = _above(values, line) & (line < NAN)
        level = _above(values, low) & ~above
        both = above.to(tl.int32) + (level.to(tl.int32) << 16)
        total = tl.sum(both)
        before = tl.cumsum(both) - both
        levels = before >> 16
        selected = above | (level & (levels < ties))
        goal = done + (before & 0xFFFF) + tl.minimum(levels, ties)
        goal = tl.max_contiguous(tl.multiple_of(goal, 4), 4)  # untrue: see _flush
        if PAGE_SIZE > 0:
            at = (positions_of.to(tl.uint32) // PAGE_SIZE).to(tl.int32)  # unsigned: fewer instructions
            page = tl.load(table + at, mask=selected)
            positions_of += ((page - at) * PAGE_SIZE).to(tl.int32)
        tl.debug_barrier()  # this piece is read: selected candidates move to its beginning or before it
        tl.store(out_columns + goal, positions_of, mask=selected)
        if KEEP_SCORES:
            tl.store(out_scores + goal, values, mask=selected)
        level_taken = tl.minimum(total >> 16, ties)
        done += (total & 0xFFFF) + level_taken
        ties -= level_taken
    return done, line


@triton.jit
def _flush(
    scores, columns, staged, held, floor, k, max_kept, PIECE: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """The scores above the floor of the staged groups join the candidates; returns their number, and the
    floor."""
    tl.debug_barrier()  # the groups are stored
    for first in range(0, 4 * staged, PIECE):
        slots = first + tl.arange(0, PIECE)
        values = tl.load(scores + CAPACITY + slots)
        values = tl.where(values == values, values, float("nan"))  # one NaN for those of either sign
        values = tl.where(slots < 4 * staged, values, float("-inf"))
        added = tl.sum(_above(values, floor).to(tl.int32))
        if (held + added > CAPACITY) & (floor < NAN):
            held, floor = _cut(scores, columns, held, floor, k, max_kept, scores, columns, None, True, 0, PIECE)
            added = tl.sum(_above(values, floor).to(tl.int32))
        if (added > 0) & (floor < NAN):
            wanted = _above(values, floor)
            goal = tl.cumsum(wanted.to(tl.int32)) + (held - 1)
            # Untrue, and harmless: the compiler keeps four neighbours in one thread, as for the loads, and does not
            # move everything to another layout first. It stores one by one, because the mask differs.
            goal = tl.max_contiguous(tl.multiple_of(goal, 4), 4)
            positions_of = tl.load(columns + CAPACITY + slots // 4) + slots % 4
            tl.store(scores + goal, values, mask=wanted)
            tl.store(columns + goal, positions_of, mask=wanted)
            held += added
    tl.debug_barrier()  # the groups are read
    return held, floor


@triton.jit
def _read(row, groups, whole):
    """Groups of 4 scores ``[groups, 4]``; instead of those after the last whole one, the last, so that no load needs a
    mask within a group, which would split it into four."""
    groups = tl.minimum(groups, whole - 1)
    return tl.load(row + 4 * groups[:, None] + tl.arange(0, 4)[None, :], mask=whole > 0)


@triton.jit
def _guess(row, length, scores, k, PIECE: tl.constexpr, SAMPLE: tl.constexpr):
    """A floor that probably a few more than k scores of the row are above: found in SAMPLE scores, in runs of 64."""
    RUNS: tl.constexpr = SAMPLE // 64
    step = length // RUNS // 4 * 4
    for first in range(0, SAMPLE, PIECE):
        slots = first + tl.arange(0, PIECE)
        tl.store(scores + slots, tl.load(row + (slots // 64) * step + slots % 64))
    tl.debug_barrier()
    # So many of the k best are expected in the sample; four standard deviations more hardly ever occur.
    expected = k * (SAMPLE * 1.0) / length
    rank = (expected + 4 * tl.sqrt(expected) + 8).to(tl.int32)
    sampled = tl.full([], SAMPLE, tl.int32)
    floor, _, _, _ = _find_line(scores, sampled, tl.full([], MINUS_INF, tl.int32), rank, rank + rank // 8, PIECE)
    tl.debug_barrier()
    return floor


# These change from step to step and are no addresses: one compiled kernel serves all.
@kernel(do_not_specialize=["rows", "width", "max_kept", "table_stride", "index_stride"])
def select_topk_kernel(
    scores, lengths, candidate_scores, candidate_columns, positions, counts, tables, sequences, page_index, keys,
    rows, width, row_stride, k, max_kept, table_stride, index_stride,
    HAS_LENGTHS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LANES: tl.constexpr, GROUPS: tl.constexpr, PIECE: tl.constexpr, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Programs take rows in turn. Each has CAPACITY candidates and a stage of two chunks to itself; a chunk is
    LANES · GROUPS groups of 4 scores. The result is positions, or with a PAGE_SIZE slots, filled up with −1, and
    counts; and candidate keys, by ``page_index``."""
    CUT_PAGE: tl.constexpr = PAGE_SIZE if keys is None else 0
    CHUNK: tl.constexpr = 4 * LANES * GROUPS
    STAGE: tl.constexpr = 2 * CHUNK + PIECE
    # The counts of a thread's GROUPS groups lie side by side in one number, so that one prefix sum does for all.
    BITS: tl.constexpr = 32 // GROUPS
    COUNT: tl.constexpr = (1 << BITS) - 1
    program = tl.program_id(0).to(tl.int64)
    candidate_scores += program * (CAPACITY + STAGE)
    candidate_columns += program * (CAPACITY + STAGE // 4)
    fields = tl.arange(0, GROUPS)[:, None]
    groups, quad = tl.arange(0, CHUNK // 4), tl.arange(0, 4)
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full([], number, tl.int64)
        length = width
        if HAS_LENGTHS:
            length = tl.minimum(width, tl.load(lengths + row).to(tl.int32))
        whole = length // 4
        source = scores + row * row_stride
        held = tl.full([], 0, tl.int32)
        floor = tl.full([], MINUS_INF, tl.int32)
        if SAMPLE > 0:  # noqa: SIM102 - decided when compiled, the other when run
            if length >= 4 * tl.maximum(SAMPLE, k):
                floor = _guess(source, length, candidate_scores, k, PIECE, SAMPLE)
        passes = tl.where(floor > MINUS_INF, 2, 1)
        while passes > 0:
            held, staged = held * 0, held * 0
            upcoming = _read(source, groups, whole)
            for first in range(0, (length + 3) // 4, CHUNK // 4):
                values = upcoming
                upcoming = _read(source, first + CHUNK // 4 + groups, whole)
                wanted = tl.max(_above(values, floor).to(tl.int32), 1)
                wanted = tl.where(first + groups < whole, wanted, 0)
                packed = tl.sum(tl.reshape(wanted, [GROUPS, LANES]) << (BITS * fields), 0)
                total = tl.sum(packed)
                added = total & COUNT
                for i in tl.static_range(1, GROUPS):
                    added += (total >> (BITS * i)) & COUNT
                if (added > 0) & (floor < NAN):
                    before = tl.cumsum(packed) - packed
                    goal = ((before[None, :] >> (BITS * fields)) & COUNT) + staged
                    for i in tl.static_range(1, GROUPS):
                        goal += tl.where(fields >= i, (total >> (BITS * (i - 1))) & COUNT, 0)
                    goal = tl.reshape(goal, [CHUNK // 4])
                    stage = candidate_scores + CAPACITY + 4 * goal[:, None] + quad[None, :]
                    tl.store(stage, values, mask=wanted[:, None] > 0)
                    tl.store(candidate_columns + CAPACITY + goal, 4 * (first + groups), mask=wanted > 0)
                    staged += added
                is_last = first + CHUNK // 4 >= (length + 3) // 4
                if (staged > CHUNK // 4) | is_last:
                    if is_last & (4 * whole < length):  # less than a group remains
                        rest = tl.load(source + 4 * whole + quad, mask=quad < length - 4 * whole, other=float("-inf"))
                        tl.store(candidate_scores + CAPACITY + 4 * staged + quad, rest)
                        tl.store(candidate_columns + CAPACITY + staged, 4 * whole)
                        staged += 1
                    held, floor = _flush(
                        candidate_scores, candidate_columns, staged, held, floor, k, max_kept, PIECE, CAPACITY
                    )
                    staged = staged * 0
                    # Again, from the first cache: so no register holds it while candidates are flushed.
                    upcoming = _read(source, first + CHUNK // 4 + groups, whole)
            passes = tl.where(held < k, passes - 1, 0)
            floor = tl.where(passes > 0, MINUS_INF, floor)
        goal = row * k
        table = tables
        if PAGE_SIZE > 0:
            table = tables + tl.load(sequences + row).to(tl.int64) * table_stride
        held, floor = _cut(
            candidate_scores, candidate_columns, held, floor, k, k, None, positions + goal, table,
            False, CUT_PAGE, PIECE,
        )  # fmt: skip
        if keys is not None:
            index = page_index + tl.load(sequences + row).to(tl.int64) * index_stride
            finish_candidates(source, positions + goal, keys + goal, table, index, held, k, PAGE_SIZE, PIECE)
        else:
            for first in range(0, k, PIECE):
                slots = first + tl.arange(0, PIECE)
                tl.store(positions + goal + slots, -1, mask=(slots >= held) & (slots < k))
        tl.store(counts + row, held)
        tl.debug_barrier()  # the candidates are read
