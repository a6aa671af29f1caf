"""Mailboxes: through them callers get results from the loop's thread."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol


class Mailbox(Protocol):
    """Receives a caller's results; any thread may put one in.

    The reply of a stream puts pieces, the reply of another call puts None when it has ended, and a job puts its tensor.
    The caller raises an exception that it receives.
    """

    def put(self, item: Any, /) -> None: ...


class WokenMailbox(ABC):
    """A mailbox whose reader is woken once for all that a thread puts into such mailboxes in :func:`waking_together`.

    Attributes:
        reader: mailboxes with the same reader are woken together.
    """

    reader: Hashable

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any, /) -> None:
        self._items.append(item)
        batch: list[WokenMailbox] | None = getattr(_filled_here, "batch", None)
        if batch is None:
            self.wake([self])
        else:
            batch.append(self)

    @abstractmethod
    def wake(self, filled: Sequence[WokenMailbox]) -> None:
        """Wakes the reader of these mailboxes, of which this is one; called in the thread that has filled them."""


class EventLoopMailbox(WokenMailbox):
    """Receives results for a task of the running event loop from other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = self._event_loop = asyncio.get_running_loop()
        self.filled = asyncio.Event()

    def wake(self, filled: Sequence[WokenMailbox]) -> None:
        with suppress(RuntimeError):  # the event loop has been closed, and no task waits
            self._event_loop.call_soon_threadsafe(_wake_tasks, filled)

    async def get(self) -> Any:
        while not self._items:
            self.filled.clear()
            if not self._items:
                await self.filled.wait()
        return self._items.popleft()


def _wake_tasks(mailboxes: Sequence[WokenMailbox]) -> None:
    for mailbox in mailboxes:
        assert isinstance(mailbox, EventLoopMailbox), "they have the same reader"
        mailbox.filled.set()


_filled_here = threading.local()  # batch: the mailboxes that this thread has filled in waking_together()


@contextmanager
def waking_together() -> Iterator[None]:
    """The readers of mailboxes that this thread fills in the block are woken at its end, each once.

    Waking a task is a system call, in which this thread may lose Python's lock to the event loop. One for all, instead
    of one for each, fills the mailboxes of 32 streams in 0.15 ms instead of 0.42.
    """
    _filled_here.batch = []
    try:
        yield
    finally:
        filled, _filled_here.batch = _filled_here.batch, None
        by_reader: dict[Hashable, list[WokenMailbox]] = {}
        for mailbox in filled:
            by_reader.setdefault(mailbox.reader, []).append(mailbox)
        for together in by_reader.values():
            together[0].wake(together)
