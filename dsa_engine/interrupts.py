"""Ctrl-C at a moment when it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Puts Ctrl-C (SIGINT) off until the end of the block, for bookkeeping that must be done wholly or not at all.

    The handler that was there before then gets the signal: ``KeyboardInterrupt`` is raised where the block ends. What
    there is to clean up belongs in a ``try`` around the block. Keep blocks short: a forward pass stays outside. Blocks
    may be nested. Only the main thread is ever interrupted; elsewhere nothing has to be done.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
