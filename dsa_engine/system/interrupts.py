"""Signals that end the process: Ctrl-C deferred to a harmless moment or ended quietly, SIGTERM in an orderly way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
INTERRUPTED = 130  # exit status after Ctrl-C, as shells give it


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C in the block ends the process with one line and status 130: for a command's imports, which take seconds.

    A ``KeyboardInterrupt`` in the middle of an import would be shown as a traceback, or become another error. Where
    Ctrl-C has a handler of the program, or is ignored, the block does nothing.
    """
    main = threading.get_ident() == threading.main_thread().ident
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def uninterrupted() -> AbstractContextManager[None]:
    """Defers Ctrl-C (SIGINT) to the end of the block, for work that must be done completely or not at all.

    The previous handler then gets the signal, so that ``KeyboardInterrupt`` is raised at the end of the block. Blocks
    may be nested. Only the main thread is ever interrupted; in other threads the block does nothing.
    """
    return _Uninterrupted()


@contextmanager
def ends_when_terminated() -> Iterator[None]:
    """Makes SIGTERM end the process as Ctrl-C does, with status 143: what the block has half written is removed, or
    kept for a resumed run. Called in the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Deferral:
    """A handler of SIGINT that stores the signal for the previous handler."""

    def __init__(self, before: Handler):
        self.before = before
        self.received: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = (number, frame)


class _Uninterrupted:
    _deferral: _Deferral | None = None

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and not isinstance(handler, _Deferral):
            self._deferral = _Deferral(handler)
            signal.signal(signal.SIGINT, self._deferral)

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None:
            signal.signal(signal.SIGINT, self._deferral.before)
            if self._deferral.received is not None:
                self._deferral.before(*self._deferral.received)
