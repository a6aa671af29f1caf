"""Pages of prompts on their way to the disk.

The ranks of a group hold the same rows, so each writes every n-th page. A page is copied to host memory when its rows
are complete, and written once the first token of its request has been sampled without an error: rows with errors must
not outlive their request. Where the disk is slow, pages wait for host memory as long as the request holds them on this
rank; those that it releases before are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from dsa_engine.engine.cache.folder import PageFolder
from dsa_engine.engine.cache.host import HostPages
from dsa_engine.engine.cache.ledger import PrefixCache
from dsa_engine.engine.cache.pool import PageCopy, PageMoves
from dsa_engine.engine.cache.transfer import PageTransfer
from dsa_engine.engine.requests.request import Chunk, Request

_REMEMBERED = 1 << 20  # pages of which this rank remembers that the folder has them


class _Copied(NamedTuple):
    """A page in host memory that is not being written yet."""

    digest: bytes
    slot: int
    wait: Callable[[], None]  # until the copy is done


@dataclass
class _Progress:
    """How far a request's pages have got on this rank."""

    numbers: range  # the pages that this rank writes and has not copied
    copied: list[_Copied] = field(default_factory=list)
    succeeded: bool = False  # whether it has its first token


@dataclass(eq=False)
class DiskStores:
    """Writes the pages of prompts on one rank.

    Args:
        free: the slots of host memory for pages on their way.

    Attributes:
        pages_written: number of pages handed to the disk.
    """

    folder: PageFolder
    prefix_cache: PrefixCache
    transfer: PageTransfer
    host: HostPages
    free: list[int]
    rank: int
    page_size: int
    pages_written: int = 0
    _requests: dict[Request, _Progress] = field(default_factory=dict)
    _copying: dict[Request, _Progress] = field(default_factory=dict)  # those of them that hold pages to be copied
    _stored: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "dsa_engine page writer")
        self._returned: SimpleQueue[tuple[_Copied, bool]] = SimpleQueue()  # from the writer, and whether it is written

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """Copies complete pages of prompts; called when a step has been launched and its requests hold their pages."""
        while not self._returned.empty():
            one, written = self._returned.get()
            self._drop(one, written)
        computed = {}
        for chunk in chunks:
            request, ranks = chunk.request, chunk.ranks
            if not request.prefilled and request.digests is not None and self.rank in ranks:
                numbers = range(self.rank - ranks[0], len(request.prompt) // self.page_size, len(ranks))
                self._copying[request] = self._requests.setdefault(request, _Progress(numbers))
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
        """Writes a request's pages that have been copied: it has a token."""
        progress = self._requests.get(request)
        if progress is None:
            return
        progress.succeeded = True
        for one in progress.copied:
            self.pages_written += 1
            self._writer.submit(self._write, one)
        progress.copied.clear()

    def ended(self, request: Request) -> None:
        """Drops a request's pages that have been copied and not written."""
        progress = self._requests.pop(request, None)
        self._copying.pop(request, None)
        for one in progress.copied if progress else ():
            one.wait()
            self._drop(one, written=False)

    def close(self) -> None:
        """Writes what has been handed over, and ends the thread that writes."""
        self._writer.shutdown()

    def _next(self, request: Request, progress: _Progress, end: int) -> Iterator[tuple[int, int, bytes]]:
        """Page, slot and digest of a request's next pages to copy: complete, not on the disk, and with room."""
        if not request.pages:
            return
        digests = self.prefix_cache.digests(request)
        complete = min(len(digests), max(end, request.num_computed_tokens) // self.page_size)
        while progress.numbers and (number := progress.numbers[0]) < complete:
            digest = digests[number]
            # For a page that was found this rank's memory is enough; one that had to be computed was perhaps deleted.
            known = number < request.num_found_pages and digest in self._stored
            if not (known or self.folder.has(digest)):
                if not self.free:
                    return
                yield request.pages[number], self.free.pop(), digest
            if len(self._stored) == _REMEMBERED:
                self._stored.clear()
            self._stored.add(digest)
            progress.numbers = progress.numbers[1:]

    def _write(self, one: _Copied) -> None:
        """Writes a page in the writer's thread, and returns its slot."""
        one.wait()
        self._returned.put((one, self.folder.write(one.digest, self.host.parts(one.slot))))

    def _drop(self, one: _Copied, written: bool) -> None:
        self.free.append(one.slot)
        if not written:
            self._stored.discard(one.digest)
