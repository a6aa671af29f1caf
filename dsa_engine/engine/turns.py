"""Threads share an engine: one of them runs the steps for all, the others wait for what these bring.

A step serves all requests, whoever brought them. So there is no thread of the engine's own: a caller that finds nobody
running steps runs them until it has what it came for; then it hands over to one that still waits. What somebody wants
changed (a request more, a request less) is done between two steps, and nobody waits for it.

Requests of asynchronous calls run in the background: a thread that is started for them runs steps like any other
caller, and ends with them.

Where several ranks run in step, threads would bring their requests in another order on each: there only the thread that
has made the engine may use it. And a call that has ended somewhere within a step leaves ranks that wait for each other:
there is no going on after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

import torch

from dsa_engine.engine.caller import Caller
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.request import Request
from dsa_engine.interrupts import uninterrupted

T = TypeVar("T")

_TICK_S = 0.2  # how often a caller that waits and has a progress bar looks at it


class Turns:
    """Who runs the steps of an engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._mutex = threading.Lock()  # for what follows; never held during a step
        self._leader: Caller | None = None  # who runs steps
        self._leading_thread: int | None = None
        self._waiting: list[Caller] = []
        self._arrivals: deque[Callable[[], None]] = deque()  # to be done between two steps
        self._endings: deque[Callable[[], None]] = deque()
        self._in_step = not engine.mesh.world.alone
        self._thread = threading.get_ident()
        self._broken: str | None = None  # what has ended a step, on several ranks
        self._background: list[Request] = []  # of asynchronous calls
        self._background_thread: threading.Thread | None = None

    def check(self, asynchronous: bool = False) -> None:
        """Whether this thread, or its event loop, may use the engine now.

        Raises:
            RuntimeError: on several ranks, it is another thread than the one that made the engine, or a call has been
                left within a step; or this thread is in a call already.
        """
        if self._leader is not None and self._leading_thread == threading.get_ident():
            raise RuntimeError("a call from within another call of the same thread, which would wait for it")
        if not self._in_step:
            return
        if asynchronous or self._thread != threading.get_ident():
            raise RuntimeError(
                "on several ranks, only the thread that has made the LLM may use it (and no asynchronous call): "
                "requests of several threads would come in another order on each rank"
            )
        if self._broken is not None:
            raise RuntimeError(
                f"an earlier call was left in the middle ({self._broken}), and the ranks are no longer in step: end "
                "this run and start it again"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which ranks wait for each other: who leaves it by an error cannot go on (:meth:`check`)."""
        try:
            yield
        except BaseException as error:
            if self._in_step:
                self._broken = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise

    def arrive(self, change: Callable[[], None]) -> None:
        """Has a request queued before the next step; ``change`` does that, and cannot fail."""
        self._arrivals.append(change)
        self._apply_if_idle()

    def end(self, change: Callable[[], None]) -> None:
        """Has requests ended before the next step. It may be called at any time, by a destructor too."""
        self._endings.append(change)
        self._apply_if_idle()

    def run(self, take: Callable[[], T | None], tick: Callable[[], object] | None = None) -> T:
        """Has steps run, by this thread or another one, until ``take()`` is something; returns that.

        Args:
            take: called between two steps, by any thread.
            tick: called by this thread now and then, after each step if it runs them.

        Raises:
            RuntimeError: see :meth:`check`.
        """
        self.check()
        caller = Caller(take, None)
        with uninterrupted():
            try:
                self._enter(caller)
                while caller.result is None and caller.error is None:
                    if self._leader is caller:
                        self._lead(caller, tick)
                    elif not caller.sleep(-1 if tick is None else _TICK_S) and tick is not None:
                        tick()
            finally:
                self._leave(caller)
        if caller.error is not None:
            raise caller.error
        return caller.result

    def alone(self, job: Callable[[], T]) -> T:
        """Does something that needs the engine for itself: what runs is brought to its end before, arrivals wait."""
        caller = Caller(lambda: None if self._engine.scheduler.has_work else True, None, alone=True)
        with uninterrupted():
            try:
                self._enter(caller)
                while self._leader is not caller:
                    caller.sleep(-1)
                self._lead(caller, None)
                if caller.error is not None:
                    raise caller.error
                with self.together():
                    return job()
            finally:
                self._leave(caller)

    async def wait(self, take: Callable[[], T | None]) -> T:
        """Waits, in an event loop, until ``take()`` is something; returns that. Steps are run by threads."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def go_on() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits there any more
                loop.call_soon_threadsafe(go_on)

        caller = Caller(take, wake)
        try:
            self._enter(caller)
            await woken
        finally:
            self._leave(caller)
        if caller.error is not None:
            raise caller.error
        return caller.result

    def run_in_background(self, requests: list[Request]) -> None:
        """Has a thread run steps until these requests have ended."""
        with uninterrupted(), self._mutex:
            more = [one for one in requests if one.finish_reason is None and one not in self._background]
            self._background += more
            if more and self._background_thread is None:
                self._background_thread = threading.Thread(target=self._drive, name="dsa_engine steps")
                self._background_thread.start()

    def _enter(self, caller: Caller) -> None:
        with uninterrupted(), self._mutex:
            if self._leader is not None:
                self._waiting.append(caller)
            elif caller.leads:
                self._leader = caller
                self._leading_thread = threading.get_ident()
            elif caller.look():
                caller.wake()
            else:
                self._waiting.append(caller)

    def _leave(self, caller: Caller) -> None:
        with uninterrupted(), self._mutex:
            if caller in self._waiting:
                self._waiting.remove(caller)
            if self._leader is caller:
                self._hand_over()

    def _lead(self, caller: Caller, tick: Callable[[], object] | None) -> None:
        """Runs steps until this caller has what it wants, or another one needs the engine for itself."""
        engine = self._engine
        self._leading_thread = threading.get_ident()
        if engine.mesh.device.type == "cuda":
            torch.cuda.set_device(engine.mesh.device)  # each thread has a current one
        while True:
            with self._mutex:
                self._apply(arrivals=not caller.alone)
            if caller.look():
                return
            if not caller.alone and any(other.alone for other in self._waiting):
                with self._mutex:
                    self._waiting.append(caller)
                    self._hand_over()
                return
            try:
                with self.together():
                    engine.step()
            except Exception as error:
                if not engine.fail(error):
                    raise
            with self._mutex:
                self._look_around()
            if tick is not None:
                tick()

    def _hand_over(self) -> None:
        """Makes another caller run the steps, one that needs the engine for itself before all others."""
        self._leader = self._leading_thread = None
        able = [caller for caller in self._waiting if caller.leads]
        heir = next((caller for caller in able if caller.alone), able[0] if able else None)
        if heir is None:
            self._apply(arrivals=True)
            self._look_around()
        else:
            self._waiting.remove(heir)
            self._leader = heir
            heir.wake()

    def _apply_if_idle(self) -> None:
        # Not waited for: a destructor may run within any line of this file. Who holds it applies, or the next caller.
        with uninterrupted():
            if self._mutex.acquire(blocking=False):
                try:
                    if self._leader is None:
                        self._apply(arrivals=True)
                        self._look_around()
                finally:
                    self._mutex.release()

    def _apply(self, arrivals: bool) -> None:
        for changes in (self._arrivals, self._endings) if arrivals else (self._endings,):
            while changes:
                changes.popleft()()

    def _look_around(self) -> None:
        """Wakes those who have what they wait for."""
        for caller in list(self._waiting):
            if not caller.alone and caller.look():
                self._waiting.remove(caller)
                caller.wake()

    def _drive(self) -> None:
        """The thread of the background."""
        while True:
            try:
                self.run(self._background_ended)
            except Exception as error:  # of no request's step
                for request in self._background:
                    request.exception = error
                    self.end(partial(self._engine.finish, request, "error", str(error)))
            with self._mutex:
                self._background = [request for request in self._background if request.finish_reason is None]
                if not self._background:
                    self._background_thread = None
                    return

    def _background_ended(self) -> bool | None:
        if not threading.main_thread().is_alive():  # the program wants to end
            for request in self._background:
                self._engine.finish(request, "abort")
        return True if all(request.finish_reason is not None for request in self._background) else None
