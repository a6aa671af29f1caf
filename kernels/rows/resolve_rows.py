"""Which row of the latent pool holds each selected row of a request, where some of its pages are *spilled*: their
latent rows lie in host memory, and copies of those used last in hot rows of the pool.

A slot below ``limit`` is a row of the pool. The slot ``limit + s`` is the spilled row s; it is resolved to
``limit + g`` where hot row g holds it. Every request has a set of hot rows. A spilled row that lies in none of them
takes the next one in their ring that this call does not use; :func:`.fetch_rows` then brings it.

    hit:      g = where[s], and g is in the own set
    miss:     g = the next of the ring with stamp[g] ≠ now;  where[row_of[g]] = −1 if that was g;  where[s] = g
    both:     row_of[g] = s,  stamp[g] = now,  resolved = limit + g

Always: where[s] = g ≥ 0 implies row_of[g] = s. What writes a spilled row sets its ``where`` to −1. Where two
requests hold a spilled page, each misses what the other has fetched since, and the order of programs decides whose hot
row ``where`` has.

Bits: whole numbers. Which hot row is taken changes no row that is read.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_AT_ONCE, _WARPS = 2048, 8
# Columns of ``of_set``: the next victim; calls so far; of all calls the rows of spilled pages, and those that missed.
COLUMNS = 4

Resolved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def resolve_rows_reference(
    slots: torch.Tensor, sets: torch.Tensor, where: torch.Tensor, row_of: torch.Tensor, stamp: torch.Tensor,
    of_set: torch.Tensor, limit: int,
) -> Resolved:  # fmt: skip
    """In shapes that follow from no contents, so that a recording can repeat it: what is not to be written goes to the
    last entries, of no page and no set."""
    hot_rows, k, each, count = row_of.shape[1], slots.shape[1], len(slots) // len(sets), len(sets)
    where, row_of, stamp = where.view(-1), row_of.view(-1), stamp.view(-1)
    no_row, no_hot = len(where) - 1, len(row_of) - 1
    sets, ring = sets.long(), torch.arange(hot_rows, device=slots.device)
    base, (hand, now, asked, misses) = sets[:, None] * hot_rows, of_set[sets].split(1, dim=1)
    now, spilled = now + 1, slots.view(count, each, k).long() - limit
    asked = asked + (spilled >= 0).sum((1, 2))[:, None]

    def find(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hot = where[rows.where(rows >= 0, no_row)].long()
        return hot, (rows >= 0) & (hot >= base) & (hot < base + hot_rows)

    resolved = slots.view(count, each, k).clone()
    for row in range(each):
        hot, hits = find(spilled[:, row])
        stamp[hot.where(hits, no_hot)] = now.int().expand(count, k)
        # A hit stays one, whatever other requests write to ``where``: so a row takes at most k hot rows.
        resolved[:, row] = (limit + hot).where(hits, resolved[:, row]).int()
        spilled[:, row].masked_fill_(hits, -1)
    source, target = (resolved.new_full((count, each * k + 1), -1) for _ in range(2))
    done = torch.zeros_like(hand)
    for row in range(each):
        rows = spilled[:, row]
        hot, hits = find(rows)
        missed = (rows >= 0) & ~hits
        victims = base + (hand + ring) % hot_rows
        free = stamp[victims] != now
        rank, missing = free.cumsum(1), missed.sum(1, keepdim=True)
        taken = free & (rank <= missing)
        in_order = torch.full_like(rows[:, :1].expand(count, k + 1), no_hot)
        in_order.scatter_(1, (rank - 1).where(taken, k), victims)
        number = missed.cumsum(1) - 1
        new = in_order.gather(1, number.clamp(min=0)).where(missed, no_hot)
        old = row_of[new].long()
        gone = (old >= 0) & missed
        gone &= where[old.where(gone, no_row)] == new
        where.index_fill_(0, old.where(gone, no_row).flatten(), -1)
        row_of[new], stamp[new] = rows.int(), now.int().expand(count, k)
        where[rows.where(missed, no_row)] = new.int()
        resolved[:, row] = resolved[:, row].where(rows < 0, (limit + new.where(missed, hot)).int())
        for at, values in ((source, rows), (target, limit + new)):
            at.scatter_(1, (done + number).where(missed, each * k), values.int())
        hand, done = (hand + (ring + 1).where(taken, 0).amax(1, keepdim=True)) % hot_rows, done + missing
    of_set[sets] = torch.cat((hand, now, asked, misses + done), dim=1)
    for entries, nothing in ((where, -1), (row_of, -1), (stamp, 0)):
        entries[-1:].fill_(nothing)
    return resolved.view_as(slots), source[:, :-1], target[:, :-1]


@kernel(do_not_specialize=["each", "limit", "hot_rows"])
def resolve_rows_kernel(
    slots, sets, where, row_of, stamp, of_set, resolved, source, target, each, limit, hot_rows, k,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The rows of a request, one after the other, BLOCK slots and RING victims at a time. Others write to ``where``
    meanwhile: it is read past the multiprocessor's own cache, and a hit stays one, so that a row takes at most k hot
    rows. Until its row's turn a miss is resolved to −2."""
    request, column, ahead = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, RING)
    numbers = of_set + tl.load(sets + request).to(tl.int64) * COLUMNS
    base, hand = tl.load(sets + request) * hot_rows, tl.load(numbers).to(tl.int32)
    now, asked, done = (tl.load(numbers + 1) + 1).to(tl.int32), hand * 0, hand * 0
    first_of_all, rows = request * each * k, each * k
    for first in range(0, rows, BLOCK):
        at = first + column
        slot = tl.load(slots + first_of_all + at, mask=at < rows, other=-1)
        spilled = slot >= limit
        hot = tl.load(where + (slot - limit), mask=spilled, other=-1, cache_modifier=".cg")
        hits = spilled & (hot >= base) & (hot < base + hot_rows)
        tl.store(stamp + hot, now, mask=hits)
        known = tl.where(hits, limit + hot, tl.where(spilled, -2, slot))
        tl.store(resolved + first_of_all + at, known, mask=at < rows)
        asked += tl.sum(spilled.to(tl.int32))
    tl.debug_barrier()  # victims are chosen after the stamps of all rows
    for row in range(each):
        for first in range(0, k, BLOCK):
            at = first_of_all + row * k + first + column
            slot = tl.load(slots + at, mask=first + column < k, other=-1)
            unknown = tl.load(resolved + at, mask=first + column < k, other=0) == -2
            hot = tl.load(where + (slot - limit), mask=unknown, other=-1, cache_modifier=".cg")
            missed = unknown & ((hot < base) | (hot >= base + hot_rows))
            missing, number = tl.sum(missed.to(tl.int32)), tl.cumsum(missed.to(tl.int32)) - 1
            chosen, seen = hand * 0, hand * 0
            while (chosen < missing) & (seen < hot_rows):
                victim = hand + ahead
                victim = base + tl.where(victim < hot_rows, victim, victim - hot_rows)
                inside = ahead < hot_rows - seen
                free = inside & (tl.load(stamp + victim, mask=inside, other=0) != now)
                rank = chosen + tl.cumsum(free.to(tl.int32)) - 1
                taken = free & (rank < missing)
                tl.store(target + first_of_all + done + rank, limit + victim, mask=taken)
                chosen += tl.sum(taken.to(tl.int32))
                last = tl.max(tl.where(taken, ahead + 1, 0))
                seen += RING
                hand += tl.where(chosen < missing, tl.minimum(RING, hot_rows), last)
                hand = tl.where(hand < hot_rows, hand, hand - hot_rows)
            tl.debug_barrier()
            new = tl.load(target + first_of_all + done + number, mask=missed, other=0) - limit
            old = tl.load(row_of + new, mask=missed, other=-1)
            there = tl.load(where + old, mask=old >= 0, other=-1, cache_modifier=".cg")
            tl.store(where + old, -1, mask=missed & (old >= 0) & (there == new))
            tl.store(where + (slot - limit), new, mask=missed)
            tl.store(row_of + new, slot - limit, mask=missed)
            tl.store(stamp + new, now, mask=missed)
            tl.store(source + first_of_all + done + number, slot - limit, mask=missed)
            tl.store(resolved + at, limit + tl.where(missed, new, hot), mask=unknown)
            done += missing
            tl.debug_barrier()  # the next rows find what these have taken
    for first in range(0, rows, BLOCK):
        at = first + column
        tl.store(source + first_of_all + at, -1, mask=(at >= done) & (at < rows))
        tl.store(target + first_of_all + at, -1, mask=(at >= done) & (at < rows))
    tl.store(numbers, hand.to(tl.int64))
    tl.store(numbers + 1, tl.load(numbers + 1) + 1)
    tl.store(numbers + 2, tl.load(numbers + 2) + asked)
    tl.store(numbers + 3, tl.load(numbers + 3) + done)


@operation(writes=("where", "row_of", "stamp", "of_set"))
def resolve_rows(
    slots: torch.Tensor, sets: torch.Tensor, where: torch.Tensor, row_of: torch.Tensor, stamp: torch.Tensor,
    of_set: torch.Tensor, limit: int,
) -> Resolved:  # fmt: skip
    """Finds the selected rows of requests in the latent pool, and takes hot rows for those that lie in none.

    Args:
        slots: int32 ``[requests · each, k]``, the selection; no slot twice in a row of it, −1 stays −1. ``each`` rows
            of a request follow one another and share what is taken.
        sets: int32 ``[requests]``, each request's set of hot rows; that of padding is the last one, of no rows.
        where: int32 ``[spilled pages + 1, page_size]``: the hot row of each spilled row, −1: none.
        row_of: int32 ``[sets + 1, hot rows of a set]``: the spilled row in each hot row, −1: none.
        stamp: the same shape: the call that has used it last.
        of_set: int64 ``[sets + 1, 4]``: for each set the next victim; its calls; of all its calls the spilled rows that
            were selected; and those of them that missed. The last page and set of these tables are of no use but here.
        limit: number of the pool's rows before the hot ones.

    Returns:
        int32 slots of the pool, shaped like ``slots``; and what :func:`.fetch_rows` is to bring, spilled rows and the
        slots that they go to, int32 ``[requests, each · k]`` each, −1 after the last.
    """
    tables = row_of.shape == stamp.shape and of_set.shape == (len(row_of), COLUMNS) and row_of.dim() == where.dim() == 2
    if slots.dim() != 2 or sets.dim() != 1 or not len(sets) or len(slots) % len(sets) or not tables:
        raise ValueError(
            f"slots {list(slots.shape)} must be [requests · each, k], sets {list(sets.shape)} [requests], where "
            f"{list(where.shape)} [pages, page_size], row_of {list(row_of.shape)} and stamp {list(stamp.shape)} "
            f"[sets, hot rows], and of_set {list(of_set.shape)} [sets, {COLUMNS}]"
        )
    if {x.dtype for x in (slots, sets, where, row_of, stamp)} != {torch.int32} or of_set.dtype != torch.int64:
        raise ValueError("slots, sets, where, row_of and stamp must be int32, and of_set int64")
    each, k, hot_rows = len(slots) // len(sets), slots.shape[1], row_of.shape[1]
    if hot_rows < each * k:
        raise ValueError(f"{hot_rows} hot rows of a request are fewer than it may select in a step, {each} · {k}")
    if not runs_triton(slots):
        return resolve_rows_reference(slots, sets, where, row_of, stamp, of_set, limit)
    slots = slots.contiguous()
    resolved, (source, target) = torch.empty_like(slots), slots.new_empty(2, len(sets), each * k)
    resolve_rows_kernel[(len(sets),)](
        slots, sets.contiguous(), where, row_of, stamp, of_set, resolved, source, target, each, limit, hot_rows, k,
        COLUMNS=COLUMNS, BLOCK=min(_AT_ONCE, next_power_of_2(k)), RING=min(_AT_ONCE, next_power_of_2(hot_rows)),
        num_warps=_WARPS,
    )  # fmt: skip
    return resolved, source, target
