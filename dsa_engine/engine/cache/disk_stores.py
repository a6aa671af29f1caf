"""Pages of prompts on their way to the disk.

The ranks of a group hold the same rows, so each writes every n-th page. A page is copied to host memory when its rows
are complete, and written once the first token of its request has been sampled without an error: rows with errors must
not outlive their request. Where the disk is slow, pages wait for host memory as long as the request holds them on this
rank; those that it releases before are not written.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue

from dsa_engine.engine.cache.folder import PageFolder
from dsa_engine.engine.cache.host_pages import HostPages
from dsa_engine.engine.cache.prefix import PrefixCache
from dsa_engine.engine.cache.transfer import PageTransfer
from dsa_engine.engine.requests.request import Chunk, Request

logger = logging.getLogger(__name__)

_REMEMBERED = 1 << 20  # pages of which this rank remembers that the folder has them


@dataclass
class _Copied:
    """A page in host memory that is not being written yet."""

    digest: bytes
    slot: int
    after: Callable[[], None] = lambda: None  # waits until the copy is done


@dataclass
class _Progress:
    """How far a request's pages have got on this rank."""

    numbers: range  # the pages that this rank writes and has not come to
    copied: list[_Copied] = field(default_factory=list)
    succeeded: bool = False  # whether it has its first token


class DiskStores:
    """Writes the pages of prompts on one rank.

    Args:
        slots: the slots of host memory for pages on their way.

    Attributes:
        pages_written: number of pages handed to the disk.
    """

    def __init__(
        self,
        folder: PageFolder,
        prefix_cache: PrefixCache,
        transfer: PageTransfer,
        host: HostPages,
        slots: Sequence[int],
        rank: int,
        page_size: int,
    ):
        self.pages_written = 0
        self._folder, self._prefix_cache, self._transfer, self._host = folder, prefix_cache, transfer, host
        self._rank, self._page_size = rank, page_size
        self._writer = ThreadPoolExecutor(1, "dsa_engine page writer")
        self._free = list(slots)
        self._returned: SimpleQueue[tuple[_Copied, bool]] = SimpleQueue()  # pages that the writer has finished with
        self._requests: dict[Request, _Progress] = {}
        self._stored: OrderedDict[bytes, None] = OrderedDict()

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """Copies complete pages of prompts; called when a step has been launched and its requests hold their pages."""
        while not self._returned.empty():
            one, stored = self._returned.get()
            self._free.append(one.slot)
            if not stored:
                self._stored.pop(one.digest, None)
        computed = {chunk.request: chunk.end for chunk in chunks}
        for chunk in chunks:
            request = chunk.request
            known = request in self._requests or request.prefilled or request.digests is None
            if self._rank in chunk.ranks and not known:
                size = len(chunk.ranks)
                self._requests[request] = _Progress(range((self._rank - chunk.ranks[0]) % size, 1 << 62, size))
        copies: list[tuple[int, int]] = []
        new = {
            request: self._next(request, p, computed.get(request, 0), copies) for request, p in self._requests.items()
        }
        if not copies:
            return
        after = self._transfer.copy_out(copies)
        for request, copied in new.items():
            for one in copied:
                one.after = after
            self._requests[request].copied += copied
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
        for one in progress.copied if progress else ():
            one.after()
            self._stored.pop(one.digest, None)
            self._free.append(one.slot)

    def close(self) -> None:
        """Writes what has been handed over, and ends the thread that writes."""
        self._writer.shutdown()

    def _next(self, request: Request, progress: _Progress, end: int, copies: list[tuple[int, int]]) -> list[_Copied]:
        """A request's next pages to copy: as many as are complete, not on the disk, and find room."""
        if not request.pages or progress.numbers[0] >= len(request.prompt) // self._page_size:
            return []
        digests = self._prefix_cache.digests(request)
        complete = min(len(request.prompt), max(end, request.num_computed_tokens)) // self._page_size
        copied = []
        while progress.numbers[0] < min(complete, len(digests)):
            number = progress.numbers[0]
            digest = digests[number]
            if not self._is_stored(digest, was_found=number < request.num_found_pages):
                if not self._free:
                    break
                slot = self._free.pop()
                copies.append((request.pages[number], slot))
                copied.append(_Copied(digest, slot))
            self._remember(digest)
            progress.numbers = progress.numbers[1:]
        return copied

    def _is_stored(self, digest: bytes, was_found: bool) -> bool:
        """Whether the folder has a page. For a page that was found this rank's memory is enough; one that had to be
        computed was perhaps deleted."""
        return (was_found and digest in self._stored) or self._folder.has(digest)

    def _write(self, one: _Copied) -> None:
        """Writes a page in the writer's thread, and returns its slot."""
        try:
            one.after()
            self._folder.write(one.digest, self._host.parts(one.slot))
        except Exception:
            logger.exception("a page is not written")
        self._returned.put((one, self._folder.has(one.digest)))

    def _remember(self, digest: bytes) -> None:
        self._stored[digest] = None
        self._stored.move_to_end(digest)
        if len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)
