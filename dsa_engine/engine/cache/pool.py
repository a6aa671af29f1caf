"""Pages of the caches of a decode-context-parallel group: free, held by requests, or cached for requests to come.

The ranks of the group hold a request's pages together, each page on one of them. A page's number is its number on its
rank times the size of the group, plus the index of the rank in the group; so is the number of a slot of host memory.
A request's pages lie on the ranks in turn, where there is room.

Further pages of a rank may be *spilled*: their index keys are on the device, their latent rows in host memory. Their
numbers follow those of the resident pages of all ranks, and they are free, held or cached like these, in an order of
their own.

A full page is known by its digest (:class:`.PageDigests`): requests whose prompts begin alike hold the same pages. A
page that no request holds keeps its digest and its rows until it is needed. With host memory for pages, its rows are
then copied there, and come back when a request begins with them.

Every rank keeps the pools of all groups, and a long prompt takes, names and returns thousands of pages in each: so
what is done to them is done to arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class PageCopy(NamedTuple):
    """A page of all layers, from the device to a slot of its rank's host memory or back. A page that spills has the
    slot -1 - q, if q is the spilled page that gets its rows."""

    to_host: bool
    page: int
    slot: int


class PageCopies(NamedTuple):
    """The same of several pages of a pool, by their numbers and slots in it."""

    to_host: bool
    pages: Ints
    slots: Ints


@dataclass
class PageMoves:
    """Everything that one step moves on this rank before its layers read pages, by the numbers of pages and slots on
    this rank."""

    copies: list[PageCopy] = field(default_factory=list)  # in this order; pages and slots may occur several times
    # For each rank of the context-parallel group, the pages to send to it, as they are after the copies, and the pages
    # to fill with what it sends, in the same order. A page may be sent several times and is received once.
    sends: list[list[int]] = field(default_factory=list)
    receives: list[list[int]] = field(default_factory=list)
    exchanges: bool = False  # whether any rank of the group sends; then all of them take part in one collective a layer


class Room(NamedTuple):
    """See :meth:`PagePool.room_beside`."""

    absent: int  # how many of the pages are neither here nor in host memory
    resident: Ints  # [ranks], free pages; so the next
    spilled: Ints
    hits: Ints  # the pages that are here
    unheld: Ints  # the resident ones of them that no request holds


class PageIndex:
    """The digests of pages as numbers, and which of ``pools`` pools have each page, on the device or in host memory.
    ``forgotten``: called with the digest of a page that no pool has any more; its number is then another digest's.

    Attributes:
        page: int32 ``[pools, numbers]``, the page on the device; -1: none.
        slot: the same of its copy in host memory; ``[0, numbers]`` where there is no host memory.
        has: bool ``[pools, numbers]``.
    """

    def __init__(self, pools: int = 1, forgotten: Callable[[bytes], None] | None = None, copies: bool = False):
        self._forgotten = forgotten
        self.page, self.has = np.empty((pools, 0), np.int32), np.empty((pools, 0), np.bool_)
        self.slot = np.empty((pools if copies else 0, 0), np.int32)
        self.clear()

    def clear(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.digests: list[bytes] = [b""] * self.page.shape[1]  # by number
        self._free = [*range(self.page.shape[1] - 1, -1, -1)]
        self._count = np.zeros(self.page.shape[1], np.int64)  # of pools that have it
        self.page.fill(-1)
        self.slot.fill(-1)
        self.has.fill(False)

    def find(self, digests: Sequence[bytes]) -> Ints:
        """The numbers of the first of these digests that have one."""
        if not digests or digests[0] not in self.numbers:
            return np.empty(0, np.int64)
        known = [*map(self.numbers.get, digests)]
        return np.array(known[: known.index(None)] if None in known else known, np.int64)

    def make(self, digests: Sequence[bytes]) -> Ints:
        """The numbers of these digests, also of new ones: some pool gains them now."""
        numbers = self.numbers
        for digest in digests:
            if digest not in numbers:
                if not self._free:
                    self._grow()
                numbers[digest] = number = self._free.pop()
                self.digests[number] = digest
        return np.array([*map(numbers.__getitem__, digests)], np.int64)

    def gain(self, pool: int, numbers: Ints) -> None:
        has = self.has[pool]
        new = numbers[~has[numbers]]
        has[new] = True
        self._count[new] += 1

    def lose(self, pool: int, numbers: Ints) -> None:
        """A pool has none of these, which it had, any more: neither page nor copy."""
        counts = self._count[numbers] - 1
        self.has[pool][numbers], self._count[numbers] = False, counts
        for number in numbers[counts == 0].tolist():
            digest = self.digests[number]
            del self.numbers[digest]
            self._free.append(number)
            if self._forgotten is not None:
                self._forgotten(digest)

    def _grow(self) -> None:
        old = self.page.shape[1]
        more = max(1024, old)
        self._free = [*range(old + more - 1, old - 1, -1)]
        self.digests += [b""] * more
        self._count = np.pad(self._count, (0, more))
        self.page = np.pad(self.page, ((0, 0), (0, more)), constant_values=-1)
        self.slot = np.pad(self.slot, ((0, 0), (0, more)), constant_values=-1)
        self.has = np.pad(self.has, ((0, 0), (0, more)))


class _Cached:
    """The cached pages of a rank, or its copies, in the order of their last use. They stand in a list in which entries
    are out of date once a page has left: ``stamps``, of all pages of the pool, has the place of the valid entry, -1 if
    there is none."""

    def __init__(self, stamps: npt.NDArray[np.int32]):
        self._stamps, self._pages = stamps, np.empty(64, np.int64)
        self._head = self._tail = self.count = 0

    def add(self, pages: Ints) -> None:
        count = len(pages)
        if self._tail + count > len(self._pages):
            valid = self.all()
            self._pages = np.empty(2 * (len(valid) + count), np.int64)
            self._head, self._tail = 0, len(valid)
            self._pages[: len(valid)], self._stamps[valid] = valid, np.arange(len(valid))
        self._pages[self._tail : self._tail + count] = pages
        self._stamps[pages] = np.arange(self._tail, self._tail + count)
        self._tail += count
        self.count += count

    def remove(self, pages: Ints) -> None:
        self._stamps[pages] = -1
        self.count -= len(pages)

    def all(self) -> Ints:
        pages = self._pages[self._head : self._tail]
        return pages[self._stamps[pages] == np.arange(self._head, self._tail)]

    def take(self, count: int) -> Ints:
        """Removes the oldest ones, and returns them."""
        parts, missing = list[Ints](), count
        while missing:
            pages = self._pages[self._head : self._head + max(missing, 64)][: self._tail - self._head]
            at = (self._stamps[pages] == np.arange(self._head, self._head + len(pages))).nonzero()[0][:missing]
            parts.append(pages[at])
            missing -= len(at)
            self._head += len(pages) if missing else int(at[-1]) + 1
        taken = np.concatenate(parts) if parts else np.empty(0, np.int64)
        self.remove(taken)
        return taken


class HostSlots:
    """Copies of pages in the host memory of a group's ranks, ``slots`` of each, known by the numbers of the pages'
    digests, and replaced in the order of their last use."""

    def __init__(self, slots: int, index: PageIndex, number: int, size: int):
        self._free = [array("i", range((slots - 1) * size + rank, -1, -size)) for rank in range(size)]
        self._stamps = np.full(slots * size, -1, np.int32)
        self._used = [_Cached(self._stamps) for _ in range(size)]
        self._number_of = np.full(slots * size, -1, np.int32)  # number of the digest of each copy
        self._index, self._number, self._size = index, number, size

    @property
    def free(self) -> int:
        """Slots that hold nothing, and those whose copies can be replaced."""
        return sum(map(len, self._free)) + sum(used.count for used in self._used)

    def slots_of(self, numbers: Ints) -> Ints:
        """The slot of the copy of each page; -1: there is none."""
        return self._index.slot[self._number, numbers].astype(np.int64)

    def lock(self, slots: Ints) -> Ints:
        """Copies in these slots, if not -1, are not replaced until :meth:`use`, which gets what this returns."""
        slots = slots[slots >= 0]
        for rank, some in by_rank(slots, self._size):
            self._used[rank].remove(some)
        return slots

    def use(self, slots: Ints) -> None:
        """Makes locked copies, or new ones, the most recently used ones."""
        for rank, some in by_rank(slots, self._size):
            self._used[rank].add(some)

    def put(self, numbers: Ints, rank: int) -> tuple[Ints, Ints]:
        """Gives evicted pages of a rank slots for their copies: the last ones, if there are fewer slots than pages
        without a copy. Returns the indices of those that get one, and the slots."""
        slots = self.slots_of(numbers)
        self.use(self.lock(slots))
        new = (slots < 0).nonzero()[0]
        slots = self.reserve(rank, len(new))
        lost, new = np.split(new, [len(new) - len(slots)])
        self._name(slots, numbers[new])
        self._index.lose(self._number, numbers[lost])
        return new, slots

    def reserve(self, rank: int, count: int) -> Ints:
        """Takes ``count`` slots of a rank, or those that there are, which hold nothing until :meth:`name`."""
        free, used = self._free[rank], self._used[rank]
        rest = max(0, len(free) - count)
        slots = np.array(free[rest:], np.int64)[::-1]
        del free[rest:]
        oldest = used.take(min(count - len(slots), used.count))
        numbers = self._number_of[oldest].astype(np.int64)
        self._index.slot[self._number, numbers] = -1
        self._index.lose(self._number, numbers[self._index.page[self._number, numbers] < 0])
        return np.concatenate((slots, oldest))

    def name(self, slot: int, digest: bytes | None) -> None:
        """Records the copy that a reserved slot holds now; None: it is free again."""
        numbers = np.empty(0, np.int64) if digest is None else self._index.make([digest])
        if digest is None or self.slots_of(numbers)[0] >= 0:
            self._free[slot % self._size].append(slot)
        else:
            self._name(np.array([slot]), numbers)
            self._index.gain(self._number, numbers)

    def _name(self, slots: Ints, numbers: Ints) -> None:
        self._index.slot[self._number, numbers], self._number_of[slots] = slots, numbers
        self.use(slots)

    def clear(self) -> None:
        """Reserved slots stay reserved; the caller clears the index."""
        for free, used in zip(self._free, self._used, strict=True):
            slots = used.all()
            free.extend(as_array(slots))
            used.remove(slots)


class PagePool:
    """Free pages are used before cached ones, the lowest first and returned ones again first. Cached pages are evicted
    in the order of their last use. Digests are given by their numbers in the index.

    A *region* is a rank's resident pages or its spilled ones: first come the regions of the former, by rank, then those
    of the latter.

    Args:
        pages, slots, spilled: of each rank.
        number: of the pool in the index.
        size: number of ranks.
    """

    def __init__(
        self,
        pages: int,
        slots: int = 0,
        index: PageIndex | None = None,
        number: int = 0,
        size: int = 1,
        spilled: int = 0,
    ):
        self._index, self._number, self._size, self._slots = index or PageIndex(), number, size, slots
        self.host = HostSlots(slots, self._index, number, size)
        self.copies: list[PageCopies] = []  # to and from the host, with which the next step begins, in their order
        # Of each rank: pages that hold nothing, the next one last; pages with a digest that no request holds.
        self.unused = [array("i", range((pages - 1) * size + rank, -1, -size)) for rank in range(size)]
        self._resident, self._regions = pages * size, size if not spilled else 2 * size
        self._first_spilled = self._resident if spilled else None
        pages += spilled
        if spilled:
            last = (pages - 1) * size
            self.unused += [array("i", range(last + rank, self._resident - 1, -size)) for rank in range(size)]
        self._stamps = np.full(pages * size, -1, np.int32)
        self._cached = [_Cached(self._stamps) for _ in range(self._regions)]
        self._shared = np.zeros(pages * size, np.int32)  # number of further requests that hold a page
        self._digest_of = np.full(pages * size, -1, np.int32)  # number of a page's digest; -1: it has none

    @property
    def free(self) -> int:
        """Resident pages that :meth:`take` can hand out: free and cached ones."""
        if self._size == 1:
            return len(self.unused[0]) + self._cached[0].count
        return sum(map(self._free_of, range(self._size)))

    @property
    def free_spilled(self) -> int:
        """The same of spilled pages."""
        return sum(map(self._free_of, range(self._size, self._regions)))

    def _free_of(self, rank: int) -> int:
        return len(self.unused[rank]) + self._cached[rank].count

    def take(self, count: int, after: int | None = None, region: int = 0) -> Ints:
        """Hands out ``count`` pages of the ranks in turn, from the rank after that of page ``after``, or from that with
        the most free pages; raises ``RuntimeError`` if fewer are free. If resident ones are short, the first are
        spilled ones. What resident ones held is copied to host memory, if there is any. ``region``: the first rank's;
        if that of its spilled pages, only such are handed out."""
        if not region and (short := count - self.free) > 0:
            if short > self.free_spilled:
                raise RuntimeError(f"{count} pages asked for, {self.free + self.free_spilled} are free")
            first = self.take(short, after, self._size)
            return np.concatenate((first, self.take(count - short, int(first[-1]))))
        if self._size == 1:
            return self._take_of(region, count)
        turns = self._turns(count, after, region)
        pages = np.empty(count, np.int64)
        for rank in range(self._size):
            mine = turns == rank
            pages[mine] = self._take_of(region + rank, int(mine.sum()))
        return pages

    def fresh(self, count: int) -> array[int]:
        """As :meth:`take`, the pages of a request without a hit: in all pools of its group before its first launch."""
        unused = self.unused[0]
        if self._size > 1 or count > len(unused):
            return as_array(self.take(count))
        pages = unused[len(unused) - count :]
        pages.reverse()
        del unused[len(unused) - count :]
        return pages

    def _turns(self, count: int, after: int | None, region: int = 0) -> Ints:
        """The rank of each of ``count`` new pages; a full one is left out."""
        size, room, turns = self._size, [*map(self._free_of, range(region, region + self._size))], list[int]()
        first = room.index(max(room)) if after is None else after + 1
        order = [(first + rank) % size for rank in range(size)]
        while len(turns) < count:
            order = [rank for rank in order if room[rank]]
            rounds = max(1, min((count - len(turns)) // len(order), *(room[rank] for rank in order)))
            turns += order * rounds
            for rank in order:
                room[rank] -= rounds
        return np.array(turns[:count], np.int64)

    def _take_of(self, region: int, count: int) -> Ints:
        unused = self.unused[region]
        rest = max(0, len(unused) - count)
        pages = np.array(unused[rest:], np.int64)[::-1]
        del unused[rest:]
        if count == len(pages):
            return pages
        evicted = self._cached[region].take(count - len(pages))
        numbers = self._digest_of[evicted].astype(np.int64)
        self._digest_of[evicted] = self._index.page[self._number, numbers] = -1
        if self._slots and region < self._size:
            copied, slots = self.host.put(numbers, region)
            self.copies.append(PageCopies(True, evicted[copied], slots))
        else:  # a spilled page may have a copy in host memory, from which it came
            self._lose(numbers)
        return np.concatenate((pages, evicted))

    def fits(self, numbers: Ints, pages: int, room: int) -> bool:
        """Whether a request of ``pages`` pages, which begins with those of these digests, takes at most ``room`` free
        pages."""
        return pages <= room or pages - self.count_held(numbers) <= room

    def count_held(self, numbers: Ints) -> int:
        pages = self._index.page[self._number, numbers]
        return int((self._stamps[pages[pages >= 0]] < 0).sum())

    def placed(self, numbers: Ints) -> int:
        """Number of digests, from the first on, whose pages :meth:`begin` has room for: rows in a rank's host memory
        come back on that rank."""
        pages = self._index.page[self._number, numbers]
        cached = np.where(self._stamps[pages] >= 0, pages, -1)
        taken = np.where(pages < 0, self.host.slots_of(numbers), cached)  # each takes a page of its rank
        count = len(numbers)
        for rank in range(self._size if count else 0):
            its = ((taken >= 0) & (taken % self._size == rank)).nonzero()[0]
            if len(its) > (room := sum(map(self._free_of, range(rank, self._regions, self._size)))):
                count = min(count, int(its[room]))
        return count

    def begin(
        self, numbers: Ints, count: int, make_room: Callable[[int, Ints], Ints] | None = None
    ) -> tuple[array[int], list[int]]:
        """Hands out a request's first ``count`` pages, which begin with those of these digests; the caller has checked
        that enough are free. Returns the pages, and the indices of those among the digests whose rows are not here.
        ``make_room``: called with the pool's number and the pages that are here, once they are held, to free resident
        ones; returns them, as some may have spilled."""
        pages = self._index.page[self._number, numbers].astype(np.int64)
        here = pages >= 0
        hits = pages[here]
        cached = self._stamps[hits] >= 0
        self._shared[hits[~cached]] += 1
        # Held before any page is taken: they are not evicted.
        for region, some in by_rank(hits[cached], self._size, self._first_spilled):
            self._cached[region].remove(some)
        brought, slots = self._bring(pages, numbers, count) if self._slots else 2 * (np.empty(0, np.int64),)
        absent = (pages < 0).nonzero()[0]
        if make_room is not None:
            pages[here] = make_room(self._number, hits)
        new = self.take(len(absent) + count - len(numbers))
        pages[absent] = new[: len(absent)]
        if len(brought):
            self.copies.append(PageCopies(False, pages[brought], slots))
            self.host.use(slots)
            self.name(pages[brought], numbers[brought])
        return as_array(np.concatenate((pages, new[len(absent) :]))), absent.tolist()

    def _bring(self, pages: Ints, numbers: Ints, count: int) -> tuple[Ints, Ints]:
        """Takes a page for each digest that is in host memory only: a spilled one if resident ones are short; returns
        their indices and their slots, locked."""
        brought = (pages < 0).nonzero()[0]
        slots = self.host.slots_of(numbers[brought])
        short = self._regions > self._size and len(brought) + count - len(numbers) > self.free
        brought, slots = brought[slots >= 0], self.host.lock(slots)
        for rank in range(self._size):
            its = brought[slots % self._size == rank]
            if self._regions > self._size:
                wanted = len(its) if short else max(0, len(its) - self._free_of(rank))
                spilled = min(wanted, self._free_of(self._size + rank))
                pages[its[:spilled]] = self._take_of(self._size + rank, spilled)
                its = its[spilled:]
            pages[its] = self._take_of(rank, len(its))
        return brought, slots

    def spillable(self, pages: Ints) -> npt.NDArray[np.bool_]:
        """Which of these held pages are resident, and held by one request only."""
        return (pages < self._resident) & (self._shared[pages] == 0)

    def spill(self, pages: Ints, limit: int) -> Ints:
        """Moves the rows and digests of held pages to spilled pages of the same ranks, and takes the former back: of
        the first ``limit`` that can (:meth:`spillable`) and find a page. Returns the pages that are held now."""
        moved, size, can = pages.copy(), self._size, self.spillable(pages)
        for rank in range(size):
            its = (can & (pages % size == rank)).nonzero()[0]
            can[its[self._free_of(size + rank) :]] = False
        can[can.nonzero()[0][limit:]] = False
        for rank in range(size):
            if not len(its := (can & (pages % size == rank)).nonzero()[0]):
                continue
            old, new = pages[its], self._take_of(size + rank, len(its))
            moved[its] = new
            self.copies.append(PageCopies(True, old, -1 - new))
            numbers = self._digest_of[old]
            self._digest_of[old], self._digest_of[new] = -1, numbers
            self._index.page[self._number, numbers[numbers >= 0]] = new[numbers >= 0]
            self.unused[rank].extend(as_array(old[::-1]))
        return moved

    def room_beside(self, numbers: Ints) -> Room:
        """What a request leaves that begins with the pages of these digests, before it takes others."""
        size, pages = self._size, self._index.page[self._number, numbers].astype(np.int64)
        absent = numbers[pages < 0]
        slots = self.host.slots_of(absent) if self._slots else absent[:0]
        back = slots[slots >= 0] % size
        hits = pages[pages >= 0]
        cached = hits[self._stamps[hits] >= 0]
        regions = cached % size + size * (cached >= self._resident)
        free = np.array([*map(self._free_of, range(self._regions))]) - np.bincount(regions, minlength=self._regions)
        resident, spilled = free[:size], free[size:]
        brought = np.bincount(back, minlength=size)
        in_spilled = np.minimum(spilled, brought)
        return Room(
            len(absent) - len(back),
            resident - (brought - in_spilled),
            spilled - in_spilled,
            hits,
            cached[cached < self._resident],
        )

    def name(self, pages: Ints, numbers: Ints) -> None:
        """Records the digests of held pages whose rows are complete. A digest keeps its first page."""
        of_digests = self._index.page[self._number]
        new = (of_digests[numbers] < 0) & (self._digest_of[pages] < 0)
        pages, numbers = pages[new], numbers[new]
        of_digests[numbers], self._digest_of[pages] = pages, numbers
        self._index.gain(self._number, numbers)

    def forget(self, pages: Ints) -> None:
        """Removes the digests of held pages: their rows may be wrong."""
        numbers = self._digest_of[pages].astype(np.int64)
        numbers = numbers[numbers >= 0]
        self._digest_of[pages] = self._index.page[self._number, numbers] = -1
        self._lose(numbers)

    def _lose(self, numbers: Ints) -> None:
        """Digests whose pages are gone are not known any more, unless host memory has a copy."""
        self._index.lose(self._number, numbers[self.host.slots_of(numbers) < 0] if self._slots else numbers)

    def release(self, pages: Ints) -> None:
        """Takes back a request's pages. The last are evicted first: pages are found from the first on."""
        pages = pages[::-1]
        shared = self._shared[pages] > 0
        self._shared[pages[shared]] -= 1
        pages = pages[~shared]
        named = self._digest_of[pages] >= 0
        for region, some in by_rank(pages[named], self._size, self._first_spilled):
            self._cached[region].add(some)
        for region, some in by_rank(pages[~named], self._size, self._first_spilled):
            self.unused[region].extend(as_array(some))

    def evict_all(self) -> None:
        """Frees all cached pages and all host memory, and forgets the digests of held pages; the caller clears the
        index."""
        for unused, cached in zip(self.unused, self._cached, strict=True):
            pages = cached.all()
            unused.extend(as_array(pages[::-1]))
            cached.remove(pages)
        self._digest_of.fill(-1)
        self.host.clear()


def by_rank(pages: Ints, size: int, first_spilled: int | None = None) -> Iterator[tuple[int, Ints]]:
    """The numbers of a pool's pages, or slots, of each rank; of each region, if there are spilled ones."""
    if first_spilled is not None:
        regions = pages % size + size * (pages >= first_spilled)
        yield from ((region, pages[regions == region]) for region in range(2 * size))
        return
    for rank in range(size if len(pages) else 0):
        yield rank, pages if size == 1 else pages[pages % size == rank]


def as_array(pages: Ints) -> array[int]:
    return array("i", pages.astype(np.int32).tobytes())
