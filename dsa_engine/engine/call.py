"""A user's call and its requests, which end with it: however it ends, and whether or not it could say so."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.request import Request
from dsa_engine.engine.turns import Turns
from dsa_engine.interrupts import uninterrupted
from dsa_engine.outputs import StreamPiece
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.tokenizer import Tokenizer


class Calls:
    """The calls that an engine serves, of all threads.

    Before a new one, requests of those that are over without having ended them are found and freed: an interrupt may
    hit the very line that was to do it.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.turns = Turns(engine)
        self.open: set[Call] = set()  # those with requests

    def new(self, asynchronous: bool = False) -> Call:
        """A call of this thread, or of an event loop.

        Raises:
            RuntimeError: this thread may not use the engine now (:meth:`.turns.Turns.check`).
        """
        self.turns.check(asynchronous)
        self.free_abandoned()
        return Call(self, None if asynchronous else threading.current_thread())

    def together(self) -> AbstractContextManager[None]:
        """A block in which ranks wait for each other (:meth:`.turns.Turns.together`)."""
        self.turns.check()
        return self.turns.together()

    def free_abandoned(self) -> None:
        for call in list(self.open):
            if call.abandoned:
                call.end()

    def alone(self, job: Callable[[], Any]) -> Any:
        """Does something that needs the engine for itself (:meth:`.turns.Turns.alone`).

        Raises:
            RuntimeError: requests of this thread's own are on their way: nobody else would bring them to their end.
        """
        self.turns.check()
        self.free_abandoned()
        if any(call.thread is threading.current_thread() and not call.over for call in list(self.open)):
            raise RuntimeError("the engine is busy with other requests of this thread; finish them first")
        return self.turns.alone(job)


class Call:
    """Requests that are made together and end together: with the block that the call is the ``with`` of, with a
    generator (:meth:`of`), or with :meth:`end`.

    Attributes:
        thread: that waits for them; None: an event loop does.
    """

    def __init__(self, calls: Calls, thread: threading.Thread | None):
        self._calls = calls
        self.thread = thread
        self.requests: list[Request] = []
        self._generator: weakref.ref[Any] | None = None
        self._protection = uninterrupted()

    def of(self, generator: Generator[Any, Any, Any] | AsyncGenerator[Any, Any]) -> None:
        """Says that the call lasts as long as this generator does, in whatever threads it is advanced."""
        self._generator = weakref.ref(generator)

    @property
    def over(self) -> bool:
        """Whether all its requests have ended."""
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def abandoned(self) -> bool:
        """Whether it is over without having ended its requests, seen from the beginning of another call."""
        if self._generator is not None:
            generator = self._generator()
            return getattr(generator, "gi_frame", None) is None and getattr(generator, "ag_frame", None) is None
        return self.thread is not None and (self.thread is threading.current_thread() or not self.thread.is_alive())

    def __enter__(self) -> Call:
        self._protection.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._protection.__exit__(None, None, None)

    def add(self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> Request:
        """Brings a request; raises what :meth:`.engine.Engine.add` raises."""
        engine = self._calls.engine
        request = engine.prepare(prompt, replace(params), tokenizer)  # a copy: the caller's may change
        with uninterrupted():
            self.requests.append(request)
            self._calls.open.add(self)
            self._calls.turns.arrive(partial(engine.queue, request))
        return request

    def run(self, tick: Callable[[], object] | None = None) -> None:
        """Returns when all its requests have ended; ``tick`` is called now and then.

        Raises:
            Exception: of a step that one of them was part of.
        """
        self._calls.turns.run(self._ended, tick)
        self._raise()

    def piece(self, request: Request, first: int) -> StreamPiece:
        """The output from token ``first`` on, as soon as there is some or the request has ended.

        Raises:
            Exception: of a step that it was part of.
        """
        piece = self._calls.turns.run(partial(_piece, request, first))
        self._raise()
        return piece

    async def run_in_background(self) -> None:
        """:meth:`run` for an event loop, which goes on meanwhile."""
        self._calls.turns.run_in_background(self.requests)
        await self._calls.turns.wait(self._ended)
        self._raise()

    async def next_piece(self, request: Request, first: int) -> StreamPiece:
        """:meth:`piece` for an event loop, which goes on meanwhile."""
        self._calls.turns.run_in_background([request])
        piece = await self._calls.turns.wait(partial(_piece, request, first))
        self._raise()
        return piece

    def end(self) -> None:
        """Ends requests that have not ended."""
        with uninterrupted():
            self._calls.open.discard(self)
            if not self.over:
                self._calls.turns.end(partial(_abort, self._calls.engine, self.requests))

    def _ended(self) -> bool | None:
        failed = any(request.exception is not None for request in self.requests)
        return True if failed or self.over else None

    def _raise(self) -> None:
        for request in self.requests:
            if request.exception is not None:
                raise request.exception


def _piece(request: Request, first: int) -> StreamPiece | None:
    if request.finish_reason is None and len(request.output) <= first:
        return None
    return request.piece(first)


def _abort(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.finish(request, "abort")
