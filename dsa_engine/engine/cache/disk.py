"""Pages between host memory and the disk.

What a folder holds is known to a rank only when it has looked, and other processes change the folder meanwhile. So the
ranks of a group agree twice on each request that waits, in the order in which they began: how many pages the folder
has, and how many of these have been read. Between that, nothing waits for the disk. Each page is read by one rank of
the group, which its number says; the others fetch its rows from that rank when the request begins (``ledger.py``).

The n pools of a group hold the same rows, so each writes every n-th page of a prompt, from the rank that has it. A page
is copied to host memory when its rows are complete, and written once the first token of its request has been sampled
without an error: rows with errors must not outlive their request. Where the disk is slow, pages wait for host memory as
long as the request holds them on this rank; those that it releases before are not written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from dsa_engine.engine.cache.folder import PageFolder
from dsa_engine.engine.cache.ledger import PageLedger, PrefixCache
from dsa_engine.engine.cache.pool import HostSlots, PageCopy, PageMoves
from dsa_engine.engine.cache.transfer import HostPages, PageTransfer
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.parallel.group import Group

_AGREED = 8  # requests that the ranks agree on at a time
_RUNNING = -1
_REMEMBERED = 1 << 20  # pages of which this rank remembers that the folder has them


@dataclass
class _Search:
    """Pages that a request's group lacks: first looked for, then read."""

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
    """Finds and reads the pages of waiting requests; the same calls come on all ranks. ``flush``: makes the copies that
    the ledger has planned, and returns a function that waits until they are done."""

    folder: PageFolder
    ledger: PageLedger
    host: HostPages
    group: Group  # all ranks, on the CPU
    flush: Callable[[], Callable[[], None]]
    pages_read: int = 0  # by this rank
    _searches: list[_Search] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rank = self.group.ranks[self.group.index]
        self._reader = ThreadPoolExecutor(1, "dsa_engine page reader")
        self._closed = False

    @property
    def pending(self) -> bool:
        return bool(self._searches)

    def awaits(self, request: Request, usable: Sequence[bytes], ranks: range) -> bool:
        """Whether a request waits for pages from the disk; the first call for it begins the search. ``usable``: digests
        of those that it need not compute; ``ranks``: the group that it is likely to run on."""
        if request.searched_disk:
            return any(search.request is request for search in self._searches)
        request.searched_disk = True
        (first,) = self.ledger.known(usable, [self.ledger.pools_of(ranks)])
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
        self._closed = True
        self._reader.shutdown(cancel_futures=True)

    def _present(self, search: _Search) -> int:
        """The first of a search's pages that this rank would read and the folder lacks; found by bisection, as a page
        is of no use without those before it. A page that is missing before it ends the reading later."""
        part = search.part(self._rank, len(search.digests))
        missing = bisect_left(part, True, key=lambda index: not self.folder.has(search.digests[index]))
        return part[missing] if missing < len(part) else len(search.digests)

    def _progress(self, search: _Search) -> int:
        """The number of first pages that this rank takes for present, or has read; or ``_RUNNING``."""
        if search.load is None:
            return search.present
        if not search.load.done():
            return _RUNNING
        part, done = search.part(self._rank, search.present), search.load.result()
        return part[done] if done < len(part) else search.present

    def _begin_reading(self, search: _Search, count: int) -> bool:
        """Reserves host memory for the first ``count`` pages, or for fewer, and starts to read them; returns whether
        there is room for any."""
        hosts = [self.ledger.pools[pool].host for pool in self.ledger.pools_of(search.ranks)]
        numbers = self.ledger.index.numbers
        known = np.array([numbers[digest] for digest in search.digests if digest in numbers], np.int64)
        locked = [host.lock(host.slots_of(known)) for host in hosts]
        for index in range(count):
            host, rank = self._host_of(search, index)
            if not len(slot := host.reserve(rank, 1)):
                break
            search.slots.append(int(slot[0]))
        for host, slots in zip(hosts, locked, strict=True):
            host.use(slots)
        search.present = len(search.slots)
        if self._rank in search.ranks and (own := search.part(self._rank, search.present)):
            size = self.ledger.dcp_size
            pages = [(search.digests[index], search.slots[index] // size) for index in own]
            search.load = self._reader.submit(self._read, pages, self.flush())
        return bool(search.slots)

    def _read(self, pages: Sequence[tuple[bytes, int]], copied: Callable[[], None]) -> int:
        """Reads pages (digest, slot) up to the first that is missing or refused, in the reader's thread, once copies
        from and to their slots are done; returns their number."""
        copied()
        for done, (digest, slot) in enumerate(pages):
            if self._closed or not self.folder.read(digest, self.host.parts(slot)):
                return done
        return len(pages)

    def _end_reading(self, search: _Search, count: int) -> None:
        for index, slot in enumerate(search.slots):
            self._host_of(search, index)[0].name(slot, search.digests[index] if index < count else None)
        if self._rank in search.ranks:
            self.pages_read += len(search.part(self._rank, count))

    def _host_of(self, search: _Search, index: int) -> tuple[HostSlots, int]:
        """The host memory of the rank that reads a page, and the rank's index there."""
        rank = search.ranks[(search.first + index) % len(search.ranks)]
        return self.ledger.pools[self.ledger.pool_of(rank)].host, rank % self.ledger.dcp_size


class _Copied(NamedTuple):
    """A page in host memory that is not being written yet."""

    digest: bytes
    slot: int
    wait: Callable[[], None]  # until the copy is done


@dataclass
class _Progress:
    """How far a request's pages have got on this rank."""

    numbers: list[int]  # those of its pages that this rank's pool writes and it has not looked at yet, the next last
    copied: list[_Copied] = field(default_factory=list)
    succeeded: bool = False  # whether it has its first token


@dataclass(eq=False)
class DiskStores:
    folder: PageFolder
    prefix_cache: PrefixCache
    transfer: PageTransfer
    host: HostPages
    free: list[int]  # the slots of host memory for pages on their way
    rank: int
    page_size: int
    dcp_size: int = 1
    pages_written: int = 0  # number of pages handed to the disk
    _requests: dict[Request, _Progress] = field(default_factory=dict)
    _copying: dict[Request, _Progress] = field(default_factory=dict)  # those of them that hold pages to be copied
    _stored: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "dsa_engine page writer")
        self._returned: SimpleQueue[tuple[_Copied, bool]] = SimpleQueue()  # from the writer, and whether it is written

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """Copies complete pages of prompts, while the requests of the step hold them."""
        while not self._returned.empty():
            one, written = self._returned.get()
            self._drop(one, written)
        computed = {}
        for chunk in chunks:
            request, ranks = chunk.request, chunk.ranks
            if not request.prefilled and request.digests is not None and self.rank in ranks:
                if request not in self._requests:
                    size, count = self.dcp_size, len(request.prompt) // self.page_size
                    pools, pool = len(ranks) // size, (self.rank - ranks[0]) // size
                    numbers = [number for number in range(count) if number // size % pools == pool]
                    self._requests[request] = _Progress(numbers[::-1])
                self._copying[request] = self._requests[request]
                computed[request] = chunk.end
        new = [
            (request, *one)
            for request, progress in self._copying.items()
            for one in self._next(request, progress, computed.get(request, 0))
        ]
        self._copying = {one: progress for one, progress in self._copying.items() if one.pages and progress.numbers}
        if not new:
            return
        self.transfer.begin(PageMoves([PageCopy(True, page, slot) for _, page, slot, _ in new]))
        wait = self.transfer.copied
        for request, _, slot, digest in new:
            self._requests[request].copied.append(_Copied(digest, slot, wait))
            if self._requests[request].succeeded:
                self.succeeded(request)

    def succeeded(self, request: Request) -> None:
        """A request has a token: its pages that have been copied are written."""
        progress = self._requests.get(request)
        if progress is None:
            return
        progress.succeeded = True
        for one in progress.copied:
            self.pages_written += 1
            self._writer.submit(self._write, one)
        progress.copied.clear()

    def ended(self, request: Request) -> None:
        progress = self._requests.pop(request, None)
        self._copying.pop(request, None)
        for one in progress.copied if progress else ():
            one.wait()
            self._drop(one, written=False)

    def close(self) -> None:
        self._writer.shutdown()

    def _next(self, request: Request, progress: _Progress, end: int) -> Iterator[tuple[int, int, bytes]]:
        """Page, slot and digest of a request's next pages to copy: complete, not on the disk, and with room."""
        if not request.pages:
            return
        digests = self.prefix_cache.digests(request)
        complete = min(len(digests), max(end, request.num_computed_tokens) // self.page_size)
        while progress.numbers and (number := progress.numbers[-1]) < complete:
            digest, (page, rank) = digests[number], divmod(request.pages[number], self.dcp_size)
            if rank == self.rank % self.dcp_size:
                # A page that was found is known by this rank's memory; one that had to be computed was perhaps deleted.
                known = number < request.num_found_pages and digest in self._stored
                if not (known or self.folder.has(digest)):
                    if not self.free:
                        return
                    yield page, self.free.pop(), digest
                if len(self._stored) == _REMEMBERED:
                    self._stored.clear()
                self._stored.add(digest)
            progress.numbers.pop()

    def _write(self, one: _Copied) -> None:
        one.wait()
        self._returned.put((one, self.folder.write(one.digest, self.host.parts(one.slot))))

    def _drop(self, one: _Copied, written: bool) -> None:
        self.free.append(one.slot)
        if not written:
            self._stored.discard(one.digest)
