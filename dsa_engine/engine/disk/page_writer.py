"""Writes pages beside the steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from dsa_engine.engine.disk.page_folder import PageFolder

logger = logging.getLogger(__name__)


class PageWriter:
    """A thread that writes pages to a folder."""

    def __init__(self, folder: PageFolder):
        self._folder = folder
        self._pages: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(
        self,
        digest: bytes,
        tokens: Sequence[int],
        parts: Sequence[memoryview],
        after: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        """Writes a page soon.

        Args:
            digest, tokens, parts: see :meth:`.PageFolder.write`.
            after: called first, in the writer's thread; blocks until ``parts`` is filled.
            done: called last, in the writer's thread: ``parts`` may be overwritten.
        """

        def work() -> None:
            try:
                after()
                self._folder.write(digest, tokens, parts)
            except Exception:
                logger.exception("a page is not written")
            done()

        self._pages.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dsa_engine page writer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread when it has written all pages that it was given."""
        self._pages.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (work := self._pages.get()) is not None:
            work()
