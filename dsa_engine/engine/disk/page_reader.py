"""Reads pages beside the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from dsa_engine.engine.disk.page_folder import PageFolder

logger = logging.getLogger(__name__)


class WantedPage(NamedTuple):
    """A page to read: its digest, the tokens that it must be of, and the memory to fill."""

    digest: bytes
    tokens: Sequence[int]
    parts: Sequence[memoryview]


class Load:
    """Pages that are being read, in order.

    Attributes:
        pages: the number of first pages that have been read, once reading has ended; None before.
    """

    def __init__(self) -> None:
        self.pages: int | None = None


class PageReader:
    """A thread that reads pages of a folder."""

    def __init__(self, folder: PageFolder):
        self._folder = folder
        self._loads: SimpleQueue[tuple[Load, Sequence[WantedPage], Callable[[], None]] | None] = SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None

    def load(self, pages: Sequence[WantedPage], after: Callable[[], None]) -> Load:
        """Starts to read pages, up to the first that is missing or refused.

        Args:
            after: called first, in the reader's thread; blocks until the memory may be written.
        """
        load = Load()
        self._loads.put((load, pages, after))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dsa_engine page reader", daemon=True)
            self._thread.start()
        return load

    def close(self) -> None:
        """Ends the thread after the page that it reads; loads that have not ended never do."""
        self._closed = True
        self._loads.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (one := self._loads.get()) is not None and not self._closed:
            load, pages, after = one
            done = 0
            try:
                after()
                while done < len(pages) and not self._closed and self._folder.read(*pages[done]):
                    done += 1
            except Exception:
                logger.exception("pages are not read")
            load.pages = done
