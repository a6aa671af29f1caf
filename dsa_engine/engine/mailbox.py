"""Mailboxes: through them callers get results from the loop's thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol


class Mailbox(Protocol):
    """Receives a caller's results; any thread may put one in.

    The reply of a stream puts pieces, the reply of another call puts None when it has ended, and a job puts its tensor.
    The caller raises an exception that it receives.
    """

    def put(self, item: Any, /) -> None: ...


class EventLoopMailbox:
    """Receives results for a task of the running event loop from other threads."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Any, /) -> None:
        self._items.append(item)
        batch: list[EventLoopMailbox] | None = getattr(_filled_here, "batch", None)
        if batch is None:
            _wake([self])
        else:
            batch.append(self)

    def wake(self) -> None:
        """Called in the event loop."""
        self._filled.set()

    async def get(self) -> Any:
        while not self._items:
            self._filled.clear()
            if not self._items:
                await self._filled.wait()
        return self._items.popleft()


_filled_here = threading.local()  # batch: the mailboxes that this thread has filled in waking_together()


@contextmanager
def waking_together() -> Iterator[None]:
    """Tasks whose mailboxes this thread fills in the block wake at its end: one wake-up for each event loop.

    Each wake-up is a system call, in which this thread may lose Python's lock to the event loop. One for all, instead
    of one for each, fills the mailboxes of 32 streams in 0.15 ms instead of 0.42.
    """
    _filled_here.batch = []
    try:
        yield
    finally:
        filled, _filled_here.batch = _filled_here.batch, None
        _wake(filled)


def _wake(mailboxes: list[EventLoopMailbox]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[EventLoopMailbox]] = {}
    for mailbox in mailboxes:
        by_loop.setdefault(mailbox.event_loop, []).append(mailbox)
    for event_loop, filled in by_loop.items():
        with suppress(RuntimeError):  # the event loop has been closed, and no task waits
            event_loop.call_soon_threadsafe(_wake_here, filled)


def _wake_here(mailboxes: list[EventLoopMailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
