"""What one rank does for pages that lie elsewhere: on other ranks, in host memory, on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from dsa_engine.engine.cache.disk_loads import DiskLoads
from dsa_engine.engine.cache.disk_stores import DiskStores
from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.model.kv_cache import KVCache

_POLL_S = 0.001  # seconds between looks at a running read, while there is nothing to compute


class DiskTier(NamedTuple):
    """Both directions between a folder of pages and this rank."""

    loads: DiskLoads
    stores: DiskStores


class PageTiers:
    """Called by the engine at the turns of a step; does nothing where there is one tier only.

    Attributes:
        disk: the disk behind the caches, if any.
    """

    def __init__(self, cache: KVCache, ledger: PageLedger):
        self.disk: DiskTier | None = None
        self._cache, self._ledger = cache, ledger
        self._copied: Callable[[], None] = lambda: None  # waits for the last copies between pages and host memory

    @contextmanager
    def moving(self, chunks: Sequence[Chunk], overlapped: bool = False) -> Iterator[None]:
        """Runs a step of ``chunks`` after the copies of pages that it begins with, or beside them.

        Args:
            overlapped: each layer waits for its own copies only; not in a CUDA graph.
        """
        transfer = self._cache.transfer
        if transfer is None:
            yield
            return
        moves = self._ledger.moves(chunks)
        copied = transfer.begin(moves)
        if moves.copies:
            self._copied = copied
        if not overlapped:
            transfer.finish()
        try:
            yield
        except BaseException:
            if not moves.exchanges:  # an exchange has broken off, and the error ends the run
                transfer.finish()  # other requests may use these pages
            raise
        transfer.finish()

    def flush(self) -> Callable[[], None]:
        """Makes the copies that the next step would begin with; returns a function that waits until they are done."""
        with self.moving([]):
            return self._copied

    def poll(self) -> None:
        """Takes what the disk has brought; called at the beginning of a step."""
        if self.disk is not None and self.disk.loads.pending:
            self.disk.loads.poll()

    def idle(self) -> None:
        """Waits a moment if requests wait for the disk; called if there is nothing to compute."""
        if self.disk is not None and self.disk.loads.pending:
            time.sleep(_POLL_S)

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """Keeps complete pages for the disk; called when a step has been launched, while its requests hold them."""
        if self.disk is not None:
            self.disk.stores.launched(chunks)

    def succeeded(self, request: Request) -> None:
        """Called when a request has a token."""
        if self.disk is not None:
            self.disk.stores.succeeded(request)

    def ended(self, request: Request) -> None:
        """Called when a request ends."""
        if self.disk is not None:
            self.disk.stores.ended(request)

    def close(self) -> None:
        """Ends the threads of the disk, once they have written what they have."""
        if self.disk is not None:
            self.disk.loads.close()
            self.disk.stores.close()
