"""Pages of waiting requests that come from the disk to host memory.

What a folder holds is known to a rank only when it has looked, and other processes change the folder meanwhile. So the
ranks of a group agree twice on each request, in the order in which they began: how many pages the folder has, and how
many of these have been read. Between that, nothing waits for the disk. Each page is read by one rank of the
group, which its number says; the others fetch its rows from that rank when the request begins (``ledger.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from dsa_engine.engine.cache.folder import PageFolder
from dsa_engine.engine.cache.host import HostPages
from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.cache.pool import HostSlots
from dsa_engine.engine.requests.request import Request
from dsa_engine.parallel.group import Group

_AGREED = 8  # requests that the ranks agree on at a time
_RUNNING = -1


@dataclass
class _Search:
    """A request's pages that its group lacks: first looked for, then read."""

    request: Request
    ranks: range
    digests: list[bytes]
    first: int  # number of the first of these pages in the request
    present: int  # number of first pages that the folder may have, as this rank knows
    slots: list[int] = field(default_factory=list)  # for each page, in host memory of the rank that reads it
    load: Future[int] | None = None  # how many of the first pages of this rank's part have been read, if it reads any

    def part(self, rank: int, count: int) -> range:
        """The pages among the first ``count`` that a rank reads."""
        return range((rank - self.ranks[0] - self.first) % len(self.ranks), count, len(self.ranks))


@dataclass
class DiskLoads:
    """Finds and reads the pages of waiting requests; the same calls come on all ranks.

    Args:
        group: all ranks, on the CPU.
        flush: makes the copies that the ledger has planned, and returns a function that waits until they are done.
    """

    folder: PageFolder
    ledger: PageLedger
    host: HostPages
    group: Group
    flush: Callable[[], Callable[[], None]]
    pages_read: int = 0  # by this rank
    _searches: list[_Search] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rank = self.group.ranks[self.group.index]
        self._reader = ThreadPoolExecutor(1, "dsa_engine page reader")
        self._closed = False

    @property
    def pending(self) -> bool:
        """Whether requests wait for the disk; the same on all ranks."""
        return bool(self._searches)

    def awaits(self, request: Request, usable: Sequence[bytes], ranks: range) -> bool:
        """Whether a request waits for pages from the disk. The first call for a request begins the search.

        Args:
            usable: digests of the pages that it need not compute.
            ranks: the group that the request is likely to run on.
        """
        if request.searched_disk:
            return any(search.request is request for search in self._searches)
        request.searched_disk = True
        (first,) = self.ledger.known(usable, [ranks])
        if first == len(usable):
            return False
        search = _Search(request, ranks, list(usable[first:]), first, len(usable) - first)
        if self._rank in ranks:
            search.present = self._present(search)
        self._searches.append(search)
        return True

    def poll(self) -> None:
        """Lets the ranks agree on what has come; called once a step on every rank while any request is pending."""
        searches = self._searches[:_AGREED]
        mine = torch.tensor([[self._progress(search) for search in searches]], dtype=torch.int64)
        counts = self.group.all_gather(mine).amin(dim=0).tolist()
        for search, count in zip(searches, counts, strict=True):
            if count == _RUNNING:
                continue
            if search.slots:
                self._end_reading(search, count)
            elif self._begin_reading(search, count):
                continue
            self._searches.remove(search)

    def close(self) -> None:
        """Ends the thread that reads, after the page that it reads."""
        self._closed = True
        self._reader.shutdown(cancel_futures=True)

    def _present(self, search: _Search) -> int:
        """The first of a search's pages that this rank would read and the folder lacks; found by bisection, as a page
        is of no use without those before it. A page that is missing before it ends the reading later."""
        part = search.part(self._rank, len(search.digests))
        missing = bisect_left(part, True, key=lambda index: not self.folder.has(search.digests[index]))
        return part[missing] if missing < len(part) else len(search.digests)

    def _progress(self, search: _Search) -> int:
        """The number of a search's first pages that this rank takes for present, or has read; or ``_RUNNING``."""
        if search.load is None:
            return search.present
        if not search.load.done():
            return _RUNNING
        part, done = search.part(self._rank, search.present), search.load.result()
        return part[done] if done < len(part) else search.present

    def _begin_reading(self, search: _Search, count: int) -> bool:
        """Reserves host memory for the first ``count`` pages, or for fewer, and starts to read them; returns whether
        there is room for any."""
        locked = frozenset(search.digests)
        for index in range(count):
            slot = self._host_of(search, index).reserve(locked)
            if slot is None:
                break
            search.slots.append(slot)
        search.present = len(search.slots)
        if self._rank in search.ranks and (own := search.part(self._rank, search.present)):
            pages = [(search.digests[index], search.slots[index]) for index in own]
            search.load = self._reader.submit(self._read, pages, self.flush())
        return bool(search.slots)

    def _read(self, pages: Sequence[tuple[bytes, int]], copied: Callable[[], None]) -> int:
        """Reads pages up to the first that is missing or refused, in the reader's thread; returns their number.

        Args:
            pages: digest and slot of each.
            copied: waits for copies from and to these slots.
        """
        copied()
        for done, (digest, slot) in enumerate(pages):
            if self._closed or not self.folder.read(digest, self.host.parts(slot)):
                return done
        return len(pages)

    def _end_reading(self, search: _Search, count: int) -> None:
        """Records the first ``count`` pages in host memory, and frees the slots of the others."""
        for index, slot in enumerate(search.slots):
            if index < count:
                self._host_of(search, index).name(slot, search.digests[index])
            else:
                self._host_of(search, index).give_back(slot)
        if self._rank in search.ranks:
            self.pages_read += len(search.part(self._rank, count))

    def _host_of(self, search: _Search, index: int) -> HostSlots:
        """Host memory of the rank that reads a page."""
        return self.ledger.pools[search.ranks[(search.first + index) % len(search.ranks)]].host
