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
    """Puts Ctrl-C (SIGINT) off until the end of the block, for bookkeeping that must be done wholly or not at all.

    The handler that was there before then gets the signal: ``KeyboardInterrupt`` is raised where the block ends. What
    takes long within (a forward pass, a wait) belongs in :func:`interruptible`. Blocks may be nested. Only the main
    thread is ever interrupted; elsewhere nothing has to be done.
    """
    return _Uninterrupted()


def interruptible() -> AbstractContextManager[None]:
    """A part of an :func:`uninterrupted` block in which Ctrl-C is let through, at once if it came before."""
    return _Interruptible()


class _Deferral:
    """A handler of SIGINT that keeps the signal for the one behind it, unless it is open."""

    def __init__(self, behind: Handler):
        self.behind = behind
        self.open = False
        self._came: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.open:
            self._came = (number, frame)
            return
        self.open = False  # what raises here may jump over the end of the block
        self.behind(number, frame)
        self.open = True

    def deliver(self) -> None:
        if self._came is not None:
            came, self._came = self._came, None
            self.behind(*came)


class _Uninterrupted:
    _deferral: _Deferral | None = None
    _outermost = _was_open = False

    def __enter__(self) -> None:
        handler = _handler()
        if isinstance(handler, _Deferral):
            self._was_open, self._deferral = handler.open, handler
            handler.open = False
        elif handler is not None:
            self._deferral, self._outermost = _Deferral(handler), True
            signal.signal(signal.SIGINT, self._deferral)

    def __exit__(self, *_: object) -> None:
        if self._deferral is None:
            return
        if self._outermost:
            signal.signal(signal.SIGINT, self._deferral.behind)
        if self._outermost or self._was_open:
            self._deferral.deliver()
            self._deferral.open = self._was_open


class _Interruptible:
    _deferral: _Deferral | None = None
    _was_open = False

    def __enter__(self) -> None:
        handler = _handler()
        if isinstance(handler, _Deferral):
            self._was_open, self._deferral = handler.open, handler
            handler.deliver()
            handler.open = True

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.open = self._was_open


def _handler() -> Handler | None:
    """What handles SIGINT, where that is this thread and a function."""
    if threading.get_ident() != threading.main_thread().ident:
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else None
