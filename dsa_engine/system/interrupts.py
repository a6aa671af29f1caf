"""Ctrl-C at a moment when it does no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def uninterrupted() -> AbstractContextManager[None]:
    """Puts Ctrl-C (SIGINT) off until the end of the block, for what must be done wholly or not at all.

    The handler that was there before then gets the signal: ``KeyboardInterrupt`` is raised where the block ends. Blocks
    may be nested. Only the main thread is ever interrupted; elsewhere nothing has to be done.
    """
    return _Uninterrupted()


class _Deferral:
    """A handler of SIGINT that keeps the signal for the one before it."""

    def __init__(self, before: Handler):
        self.before = before
        self.came: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = (number, frame)


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
            if self._deferral.came is not None:
                self._deferral.before(*self._deferral.came)
