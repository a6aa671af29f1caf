"""Pages of the caches on one rank: free, held by requests, or cached for requests to come.

A full page is known by its digest (:class:`.PageDigests`): requests whose prompts begin alike hold the same pages. A
page that no request holds keeps its digest and its rows until it is needed. With host memory for pages, its rows are
then copied there, and come back when a request begins with them.

Every rank keeps the pools of all ranks, and a long prompt takes, names and returns thousands of pages in each: so these
loops make no calls.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class PageCopy(NamedTuple):
    """A page of all layers, from the device to a slot of host memory or back."""

    to_host: bool
    page: int  # number in the pools
    slot: int  # number in host memory


@dataclass
class PageMoves:
    """Everything that one step moves on this rank before its layers read pages."""

    copies: list[PageCopy] = field(default_factory=list)  # in this order; pages and slots may occur several times
    # For each rank of the context-parallel group, the pages to send to it, as they are after the copies, and the pages
    # to fill with what it sends, in the same order. A page may be sent several times and is received once.
    sends: list[list[int]] = field(default_factory=list)
    receives: list[list[int]] = field(default_factory=list)
    exchanges: bool = False  # whether any rank of the group sends; then all of them take part in one collective a layer


@dataclass
class PageIndex:
    """The ranks that have each page, on the device or in host memory."""

    forgotten: Callable[[bytes], None] | None = None  # called with the digest of a page that no rank has any more
    ranks: dict[bytes, int] = field(default_factory=dict)  # by digest, the sum of 1 << rank of those that have the page

    def add(self, digest: bytes, ranks: int) -> None:
        self.ranks[digest] = self.ranks.get(digest, 0) | ranks

    def lost(self, digests: Iterable[bytes], ranks: int) -> None:
        ranks_of, remain = self.ranks, ~ranks
        for digest in digests:
            if others := ranks_of.get(digest, 0) & remain:
                ranks_of[digest] = others
            elif ranks_of.pop(digest, None) is not None and self.forgotten is not None:
                self.forgotten(digest)


class HostSlots:
    """Copies of pages in one rank's host memory, known by the digests of the pages, and replaced in the order of their
    last use. ``lost``: called with the digest of a copy that is replaced."""

    def __init__(self, slots: int, index: PageIndex, rank: int, lost: Callable[[bytes], None]):
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._index, self._rank, self._lost = index, rank, lost

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slot_of

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._slot_of.items())

    def use(self, digest: bytes) -> int:
        """The slot of a page that is here, which becomes the most recently used one."""
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]

    def put(self, digest: bytes, locked: Container[bytes] = ()) -> int | None:
        """The slot for a copy of a page, without replacing those of ``locked``; None if the page is here already, or no
        slot can be replaced."""
        if digest in self._slot_of:
            self.use(digest)
            return None
        slot = self.reserve(locked)
        if slot is not None:
            self._slot_of[digest] = slot
        return slot

    def reserve(self, locked: Container[bytes] = ()) -> int | None:
        """Takes a slot, which holds nothing until :meth:`name`; None if none can be replaced."""
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest in self._slot_of if digest not in locked), None)
        if oldest is None:
            return None
        slot = self._slot_of.pop(oldest)
        self._lost(oldest)
        return slot

    def name(self, slot: int, digest: bytes | None) -> None:
        """Records the copy that a reserved slot holds now; None: it is free again."""
        if digest is None or digest in self._slot_of:
            self._free.append(slot)
        else:
            self._slot_of[digest] = slot
            self._index.add(digest, 1 << self._rank)

    def clear(self) -> None:
        """Reserved slots stay reserved."""
        self._free += self._slot_of.values()
        self._slot_of.clear()


class PagePool:
    """Free pages are used before cached ones, the lowest first and returned ones again first. Cached pages are evicted
    in the order of their last use. The caller tells the index what the rank gains, at once for all ranks of a group,
    and what :meth:`take` has ``evicted``, at once for all ranks that lose the same pages.
    """

    def __init__(self, pages: int, slots: int = 0, index: PageIndex | None = None, rank: int = 0):
        self._index, self._rank, self._slots = index or PageIndex(), rank, slots
        self.host = HostSlots(slots, self._index, rank, self._lost)
        self.copies: list[PageCopy] = []  # to and from the host, with which the next step begins, in their order
        self.evicted: list[bytes] = []  # digests of pages that are nowhere else here
        self.unused = array("i", range(pages - 1, -1, -1))  # pages that hold nothing, the next one last
        self._shared: dict[int, int] = {}  # number of further requests that hold a page
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # pages with a digest that no request holds, oldest first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._page_of or digest in self.host

    @property
    def free(self) -> int:
        """Pages that :meth:`take` can hand out: free and cached ones."""
        return len(self.unused) + len(self._cached)

    def take(self, count: int, locked: frozenset[bytes] = frozenset()) -> array[int]:
        """Hands out ``count`` pages; raises ``RuntimeError`` if fewer are free. What they held is copied to host
        memory, if there is any, without replacing the copies of ``locked``."""
        unused = self.unused
        if count <= len(unused):
            pages = unused[len(unused) - count :]
            pages.reverse()
            del unused[len(unused) - count :]
            return pages
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} are free")
        pages = unused[::-1]
        del unused[:]
        page_of, cached = self._page_of, self._cached
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
            if (slot := self.host.put(digest, locked)) is not None:
                self.copies.append(PageCopy(True, page, slot))
            else:
                self._lost(digest)
        return pages

    def count_held(self, digests: Iterable[bytes]) -> int:
        pages = [self._page_of.get(digest) for digest in digests]
        return sum(page is not None and page not in self._cached for page in pages)

    def begin(self, digests: Sequence[bytes], count: int) -> tuple[array[int], list[int]]:
        """Hands out a request's first ``count`` pages, which begin with those of ``digests``; the caller has checked
        that enough are free. Returns the pages, and the indices of those among ``digests`` whose rows are not here."""
        if not digests:
            return self.take(count), []
        known = [self._page_of.get(digest) for digest in digests]
        for page in known:
            if page is None:
                continue
            if page in self._cached:  # held before any page is taken, so that none of them is evicted
                del self._cached[page]
            else:
                self._shared[page] = self._shared.get(page, 0) + 1
        absent = [index for index, page in enumerate(known) if page is None]
        in_host = {index for index in absent if digests[index] in self.host}
        locked = frozenset(digests[index] for index in in_host)
        new = iter(self.take(len(absent) + count - len(digests), locked))
        pages = array("i", [next(new) if page is None else page for page in known])
        for index in sorted(in_host):
            self.copies.append(PageCopy(False, pages[index], self.host.use(digests[index])))
            self.name(pages[index : index + 1], digests[index : index + 1])
        pages.extend(new)
        return pages, [index for index in absent if index not in in_host]

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
        shared, digest_of, cached, unused = self._shared, self._digest_of, self._cached, self.unused
        for page in reversed(pages):
            if page in shared:
                if shared[page] > 1:
                    shared[page] -= 1
                else:
                    del shared[page]
            elif page in digest_of:
                cached[page] = None
            else:
                unused.append(page)

    def evict_all(self) -> None:
        """Frees all cached pages and all host memory, and forgets the digests of held pages; the index is not told."""
        self.unused.extend(reversed(self._cached))
        self._cached.clear()
        self._page_of.clear()
        self._digest_of.clear()
        self.host.clear()

    def _lost(self, digest: bytes) -> None:
        if digest not in self:
            self._index.lost((digest,), 1 << self._rank)
