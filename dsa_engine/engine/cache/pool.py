"""Pages of the caches of a decode-context-parallel group: free, held by requests, or cached for requests to come.

The ranks of the group hold a request's pages together, each page on one of them. A page's number is its number on its
rank times the size of the group, plus the index of the rank in the group; so is the number of a slot of host memory.
A request's pages lie on the ranks in turn, where there is room.

A full page is known by its digest (:class:`.PageDigests`): requests whose prompts begin alike hold the same pages. A
page that no request holds keeps its digest and its rows until it is needed. With host memory for pages, its rows are
then copied there, and come back when a request begins with them.

Every rank keeps the pools of all groups, and a long prompt takes, names and returns thousands of pages in each: so
these loops make no calls.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np


class PageCopy(NamedTuple):
    """A page of all layers, from the device to a slot of its rank's host memory or back."""

    to_host: bool
    page: int
    slot: int


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


@dataclass
class PageIndex:
    """The pools that have each page, on the device or in host memory."""

    forgotten: Callable[[bytes], None] | None = None  # called with the digest of a page that no pool has any more
    pools: dict[bytes, int] = field(default_factory=dict)  # by digest, the sum of 1 << number of those that have it

    def add(self, digest: bytes, pools: int) -> None:
        self.pools[digest] = self.pools.get(digest, 0) | pools

    def lost(self, digests: Iterable[bytes], pools: int) -> None:
        pools_of, remain = self.pools, ~pools
        for digest in digests:
            if others := pools_of.get(digest, 0) & remain:
                pools_of[digest] = others
            elif pools_of.pop(digest, None) is not None and self.forgotten is not None:
                self.forgotten(digest)


class HostSlots:
    """Copies of pages in the host memory of a group's ranks, ``slots`` of each, known by the digests of the pages, and
    replaced in the order of their last use. ``lost``: called with the digest of a copy that is replaced."""

    def __init__(self, slots: int, index: PageIndex, number: int, size: int, lost: Callable[[bytes], None]):
        self._free = [[*range((slots - 1) * size + rank, -1, -size)] for rank in range(size)]
        self._slot_of: dict[bytes, int] = {}
        self._used: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]  # least recently used first
        self._index, self._number, self._size, self._lost = index, number, size, lost

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Each rank's in the order of their last use."""
        return ((digest, self._slot_of[digest]) for used in self._used for digest in used)

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

    def rank_of(self, digest: bytes) -> int:
        """Index of the rank that has a page that is here."""
        return self._slot_of[digest] % self._size

    def use(self, digest: bytes) -> int:
        """The slot of a page that is here, which becomes the most recently used one."""
        slot = self._slot_of[digest]
        self._used[slot % self._size].move_to_end(digest)
        return slot

    def put(self, digest: bytes, rank: int, locked: Container[bytes] = ()) -> int | None:
        """The slot for a copy of a page on a rank, without replacing those of ``locked``; None if the page is here
        already, or no slot can be replaced."""
        if digest in self._slot_of:
            self.use(digest)
            return None
        slot = self.reserve(rank, locked)
        if slot is not None:
            self._slot_of[digest] = slot
            self._used[rank][digest] = None
        return slot

    def reserve(self, rank: int, locked: Container[bytes] = ()) -> int | None:
        """Takes a slot of a rank, which holds nothing until :meth:`name`; None if none can be replaced."""
        if self._free[rank]:
            return self._free[rank].pop()
        oldest = next((digest for digest in self._used[rank] if digest not in locked), None)
        if oldest is None:
            return None
        del self._used[rank][oldest]
        slot = self._slot_of.pop(oldest)
        self._lost(oldest)
        return slot

    def name(self, slot: int, digest: bytes | None) -> None:
        """Records the copy that a reserved slot holds now; None: it is free again."""
        rank = slot % self._size
        if digest is None or digest in self._slot_of:
            self._free[rank].append(slot)
        else:
            self._slot_of[digest] = slot
            self._used[rank][digest] = None
            self._index.add(digest, 1 << self._number)

    def clear(self) -> None:
        """Reserved slots stay reserved."""
        for slot in self._slot_of.values():
            self._free[slot % self._size].append(slot)
        self._slot_of.clear()
        for used in self._used:
            used.clear()


class PagePool:
    """Free pages are used before cached ones, the lowest first and returned ones again first. Cached pages are evicted
    in the order of their last use. The caller tells the index what the group gains, at once for all pools that gain
    the same, and what :meth:`take` has ``evicted``, at once for all that lose the same pages.

    Args:
        pages, slots: of each rank.
        number: of the pool in the index.
        size: number of ranks.
    """

    def __init__(self, pages: int, slots: int = 0, index: PageIndex | None = None, number: int = 0, size: int = 1):
        self._index, self._number, self._size, self._slots = index or PageIndex(), number, size, slots
        self.host = HostSlots(slots, self._index, number, size, self._lost)
        self.copies: list[PageCopy] = []  # to and from the host, with which the next step begins, in their order
        self.evicted: list[bytes] = []  # digests of pages that are nowhere else here
        # Of each rank: pages that hold nothing, the next one last; pages with a digest that no request holds, oldest
        # first.
        self.unused = [array("i", range((pages - 1) * size + rank, -1, -size)) for rank in range(size)]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(size)]
        self._shared: dict[int, int] = {}  # number of further requests that hold a page
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._page_of or digest in self.host

    @property
    def free(self) -> int:
        """Pages that :meth:`take` can hand out: free and cached ones."""
        return sum(map(len, self.unused)) + sum(map(len, self._cached))

    def _free_of(self, rank: int) -> int:
        return len(self.unused[rank]) + len(self._cached[rank])

    def take(self, count: int, after: int | None = None, locked: frozenset[bytes] = frozenset()) -> array[int]:
        """Hands out ``count`` pages of the ranks in turn, from the rank after that of page ``after``, or from that with
        the most free pages; raises ``RuntimeError`` if fewer are free. What they held is copied to host memory, if
        there is any, without replacing the copies of ``locked``."""
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} are free")
        if self._size == 1:
            return self._take_of(0, count, locked)
        turns = self._turns(count, after)
        pages = np.empty(count, np.int32)
        for rank in set(turns):
            mine = np.equal(turns, rank)
            pages[mine] = self._take_of(rank, int(mine.sum()), locked)
        return array("i", pages.tobytes())

    def _turns(self, count: int, after: int | None) -> list[int]:
        """The rank of each of ``count`` new pages; a full one is left out."""
        size, room, turns = self._size, [*map(self._free_of, range(self._size))], list[int]()
        first = room.index(max(room)) if after is None else after + 1
        order = [(first + rank) % size for rank in range(size)]
        while len(turns) < count:
            order = [rank for rank in order if room[rank]]
            rounds = max(1, min((count - len(turns)) // len(order), *(room[rank] for rank in order)))
            turns += order * rounds
            for rank in order:
                room[rank] -= rounds
        return turns[:count]

    def _take_of(self, rank: int, count: int, locked: frozenset[bytes]) -> array[int]:
        unused = self.unused[rank]
        if count <= len(unused):
            pages = unused[len(unused) - count :]
            pages.reverse()
            del unused[len(unused) - count :]
            return pages
        pages = unused[::-1]
        del unused[:]
        page_of, cached = self._page_of, self._cached[rank]
        evicted = [*islice(cached, count - len(pages))]
        pages.extend(evicted)
        for page in evicted:
            del cached[page]
        digests = [*map(self._digest_of.pop, evicted)]
        for digest in digests:
            del page_of[digest]
        if not self._slots:
            self.evicted += digests
            return pages
        for page, digest in zip(evicted, digests, strict=True):
            if (slot := self.host.put(digest, rank, locked)) is not None:
                self.copies.append(PageCopy(True, page, slot))
            else:
                self._lost(digest)
        return pages

    def count_held(self, digests: Iterable[bytes]) -> int:
        pages = [self._page_of.get(digest) for digest in digests]
        return sum(page is not None and page not in self._cached[page % self._size] for page in pages)

    def fits(self, digests: Sequence[bytes], pages: int, room: int) -> bool:
        """Whether a request of ``pages`` pages, which begins with those of ``digests``, takes at most ``room`` free
        pages."""
        return pages <= room or pages - self.count_held(digests) <= room

    def placed(self, digests: Sequence[bytes]) -> int:
        """Number of digests, from the first on, whose pages :meth:`begin` has room for: rows in a rank's host memory
        come back on that rank."""
        room = [*map(self._free_of, range(self._size))]
        for number, digest in enumerate(digests):
            page = self._page_of.get(digest)
            rank = None
            if page is None:
                rank = self.host.rank_of(digest) if digest in self.host else None
            elif page in self._cached[page % self._size]:
                rank = page % self._size
            if rank is not None:
                room[rank] -= 1
                if room[rank] < 0:
                    return number
        return len(digests)

    def begin(self, digests: Sequence[bytes], count: int) -> tuple[array[int], list[int]]:
        """Hands out a request's first ``count`` pages, which begin with those of ``digests``; the caller has checked
        that enough are free. Returns the pages, and the indices of those among ``digests`` whose rows are not here."""
        if not digests:
            return self.take(count), []
        known = [self._page_of.get(digest) for digest in digests]
        for page in known:
            if page is None:
                continue
            if page in (cached := self._cached[page % self._size]):  # held before any page is taken: not evicted
                del cached[page]
            else:
                self._shared[page] = self._shared.get(page, 0) + 1
        absent = [index for index, page in enumerate(known) if page is None]
        in_host = [index for index in absent if digests[index] in self.host]
        locked = frozenset(digests[index] for index in in_host)
        on_rank: dict[int, list[int]] = {}
        for index in in_host:
            on_rank.setdefault(self.host.rank_of(digests[index]), []).append(index)
        for rank, indices in on_rank.items():
            for index, page in zip(indices, self._take_of(rank, len(indices), locked), strict=True):
                known[index] = page
        new = iter(self.take(len(absent) - len(in_host) + count - len(digests), locked=locked))
        pages = array("i", [next(new) if page is None else page for page in known])
        for index in in_host:
            self.copies.append(PageCopy(False, pages[index], self.host.use(digests[index])))
            self.name(pages[index : index + 1], digests[index : index + 1])
        pages.extend(new)
        brought = frozenset(in_host)
        return pages, [index for index in absent if index not in brought]

    def name(self, pages: Iterable[int], digests: Iterable[bytes]) -> None:
        """Records the digests of held pages whose rows are complete. A digest keeps its first page."""
        page_of, digest_of = self._page_of, self._digest_of
        for page, digest in zip(pages, digests, strict=True):
            if digest not in page_of and page not in digest_of:
                page_of[digest] = page
                digest_of[page] = digest

    def forget(self, pages: Iterable[int]) -> None:
        """Removes the digests of held pages: their rows may be wrong."""
        for page in pages:
            if (digest := self._digest_of.pop(page, None)) is not None:
                del self._page_of[digest]
                self._lost(digest)

    def release(self, pages: Sequence[int]) -> None:
        """Takes back a request's pages. The last are evicted first: pages are found from the first on."""
        shared, digest_of, cached, unused, size = self._shared, self._digest_of, self._cached, self.unused, self._size
        for page in reversed(pages):
            if page in shared:
                if shared[page] > 1:
                    shared[page] -= 1
                else:
                    del shared[page]
            elif page in digest_of:
                cached[page % size][page] = None
            else:
                unused[page % size].append(page)

    def evict_all(self) -> None:
        """Frees all cached pages and all host memory, and forgets the digests of held pages; the index is not told."""
        for unused, cached in zip(self.unused, self._cached, strict=True):
            unused.extend(reversed(cached))
            cached.clear()
        self._page_of.clear()
        self._digest_of.clear()
        self.host.clear()

    def _lost(self, digest: bytes) -> None:
        if digest not in self:
            self._index.lost((digest,), 1 << self._number)
