"""Somebody who waits for what the steps of an engine bring."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dsa_engine.interrupts import interruptible


class Caller:
    """Somebody who wants something of the engine.

    Attributes:
        take: called between two steps, by whoever runs them; what it returns ends the wait, unless it is None.
        wake: called when the wait has ended, or when this one is to run the steps.
        alone: it wants the engine for itself, and waits for nothing but that.
        leads: it could run the steps.
    """

    def __init__(self, take: Callable[[], Any], wake: Callable[[], object] | None, alone: bool = False):
        self.take = take
        self.leads = wake is None
        self.alone = alone
        self.result: Any = None
        self.error: Exception | None = None
        self._turn = threading.Lock()
        self._turn.acquire()
        self.wake = wake or self._wake

    def look(self) -> bool:
        """Whether the wait has ended."""
        try:
            self.result = self.take()
        except Exception as error:  # it is the caller's, not that of the thread that looks
            self.error = error
        return self.result is not None or self.error is not None

    def _wake(self) -> None:
        if self._turn.locked():  # it may have been woken before, and not have slept since
            self._turn.release()

    def sleep(self, seconds: float) -> bool:
        """Waits to be woken, for ever where ``seconds`` is -1; whether it was."""
        with interruptible():
            return self._turn.acquire(timeout=seconds)
