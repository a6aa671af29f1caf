"""Signals that end the process: Ctrl-C deferred to a harmless moment, SIGTERM in an orderly way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

ABANDONED = "dsa_engine, interrupted"  # the name of a thread whose work is not wanted any longer


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C (SIGINT) to the end of the block, for work that must be done completely or not at all.

    The previous handler then gets the signal, so that ``KeyboardInterrupt`` is raised at the end of the block. Blocks
    may be nested. Only the main thread is ever interrupted; in other threads the block does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received and callable(before):
            before(*received[-1])


def exit_interrupted() -> NoReturn:
    """Ends the process after Ctrl-C with status 130."""
    if any(thread.name == ABANDONED for thread in threading.enumerate()):  # for which an orderly exit would wait
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(130)
    sys.exit(130)


@contextmanager
def ends_when_terminated() -> Iterator[None]:
    """Makes SIGTERM end the process as Ctrl-C does, with status 143, so that what the block has half written is
    removed. Called in the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
