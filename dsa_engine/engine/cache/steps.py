"""The turns of a rank's pages in a step: to and from other ranks, host memory and the disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dsa_engine.engine.cache.disk import DiskLoads, DiskStores
from dsa_engine.engine.cache.folder import PageFolder
from dsa_engine.engine.cache.link import PageSender, RankPages
from dsa_engine.engine.cache.transfer import PageTransfer
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.parallel import Mesh

_POLL_S = 0.001  # seconds between looks at a running read, while there is nothing to compute


class CacheSteps:
    """In a step :meth:`begin_step`, and :meth:`moving` around the forward pass.

    ``folder``: the pages on the disk, which pass through ``transfer.host``. ``sender``: sends the pages that steps fill
    to the ranks that decode; None: this rank decodes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        mesh: Mesh,
        transfer: PageTransfer | None = None,
        folder: PageFolder | None = None,
        sender: PageSender | None = None,
    ):
        self.transfer, self._sender, self._ledger = transfer, sender, scheduler.ledger
        # Each is given a step's chunks before it runs, and returns the pages that this rank sends under it.
        self.leaving: list[Callable[[Sequence[Chunk]], Iterable[RankPages]]] = []
        self.loads: DiskLoads | None = None
        self.stores: DiskStores | None = None  # told when a step has been launched and when a request has a token
        self._computes = True  # whether a step has run since the last begin_step
        if folder is not None:
            assert transfer is not None and transfer.host is not None, "a folder needs host memory"
            host, ledger, capacity = transfer.host, scheduler.ledger, scheduler.capacity
            self.loads = DiskLoads(folder, ledger, host, mesh.host, self.flush)
            slots = list(range(ledger.slots, host.slots))
            sizes = mesh.rank, capacity.page_size, capacity.dcp_size
            self.stores = DiskStores(folder, scheduler.prefix_cache, transfer, host, slots, *sizes)
            scheduler.page_sources.append(self.loads)

    def begin_step(self) -> None:
        """Takes what the disk has brought; waits a moment if requests wait for it and nothing else is computed."""
        if self.loads is not None and self.loads.pending:
            if not self._computes:
                time.sleep(_POLL_S)
            self._computes = False
            self.loads.poll()

    @contextmanager
    def moving(self, chunks: Sequence[Chunk], overlapped: bool = False) -> Iterator[None]:
        """Runs a step of ``chunks`` after the copies of pages that it begins with, or beside them. ``overlapped``: each
        layer waits for its own copies only; not in a CUDA graph."""
        self._computes = True
        with ExitStack() as finally_:
            if self._sender is not None:
                self._sender.begin([pages for hook in self.leaving for pages in hook(chunks)])
                finally_.callback(self._sender.finish)
            transfer = self.transfer
            if transfer is None:
                yield
                return
            moves = self._ledger.moves(chunks)
            transfer.begin(moves)
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
        assert self.transfer is not None, "only pages of the disk need it"
        self.transfer.begin(self._ledger.moves([]))
        return self.transfer.copied

    def ended(self, request: Request) -> None:
        if self.stores is not None:
            self.stores.ended(request)

    def close(self) -> None:
        """Ends the threads of the disk, once they have written what they have."""
        for one in (self.loads, self.stores):
            if one is not None:
                one.close()
