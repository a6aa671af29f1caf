"""The HTTP server's end: an engine in another process, for calls in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from dsa_engine.engine.calls.async_calls import AsyncCalls
from dsa_engine.engine.calls.call import Sent
from dsa_engine.engine.calls.reply import Failure, Inbox
from dsa_engine.engine.requests.limits import Add
from dsa_engine.server.errors import EngineError, EngineGone
from dsa_engine.server.messages import (
    AbortRequests,
    AskState,
    CacheReset,
    EngineFacts,
    EngineState,
    Failed,
    NewRequest,
    NewTokens,
    ResetCache,
    encode,
    from_engine,
)

_MAX_STEPS_AT_ONCE = 8
_SILENT_S = 10  # an engine that has said nothing for longer is stopped; it says something every second


class EngineClient(AsyncCalls):
    """Does what :class:`dsa_engine.LLM` does in an event loop, with the engine of a :class:`.process.Relay`.

    Text is made here, and stop strings are found here, so the engine's process has little to do for each token. All
    runs in one event loop, between :meth:`connect` and :meth:`close`; it takes the messages of its own calls, see
    :class:`dsa_engine.engine.calls.call.MessageQueue`. ``folder`` has the relay's sockets.
    """

    def __init__(self, facts: EngineFacts, folder: str):
        trusts, defaults = facts.trust_remote_code, facts.default_sampling
        super().__init__(self, facts.limits, Path(facts.folder), trusts, defaults, facts.stream_interval)
        self.facts, self._sockets = facts, folder
        self.ids: Iterator[int] = count()
        self._error: EngineError | None = None
        self._inbox = Inbox(self.abort)
        # Answers come in the order of the questions: those about the state, and those to reset the cache.
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._resets: deque[asyncio.Future[Any]] = deque()

    def connect(self) -> None:
        """Begins, in the event loop of all calls."""
        self._loop, self._context = asyncio.get_running_loop(), zmq.asyncio.Context()
        self._tokens = self._context.socket(zmq.PULL)
        self._tokens.set_hwm(0)
        self._tokens.bind(f"ipc://{self._sockets}/tokens")
        self._requests: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._requests.set_hwm(0)
        self._requests.connect(f"ipc://{self._sockets}/requests")
        self._silent = 0  # seconds in which this event loop has run, and has heard nothing of the engine
        self._beat()

    def _beat(self) -> None:
        self._silent += 1
        self._send()
        self._loop.call_later(1.0, self._beat)

    async def receive(self) -> EngineError:
        """Takes what the engine sends, until it ends; returns why."""
        there: zmq.Socket[bytes] = zmq.Socket.shadow(self._tokens.underlying)
        while self._error is None:
            messages = from_engine(await self._tokens.recv())
            self._silent = 0
            with suppress(zmq.Again):  # if this process is behind, a stream writes what it has of several steps at once
                for _ in range(_MAX_STEPS_AT_ONCE - 1):
                    messages += from_engine(there.recv(zmq.NOBLOCK))
            for message in messages:
                self._take(message)
            await asyncio.sleep(0)  # a message that is there already would come before all other tasks
        return self._error

    def close(self) -> None:
        """Closes the connection; the engine's process ends the requests of this one when it has ended."""
        self._requests.close(linger=100)
        self._tokens.close(linger=0)
        self._context.term()

    def check(self) -> None:
        """Raises the error that has ended the engine, if it has ended, or one if its process is stopped."""
        if self._error is not None:
            raise self._error
        if self._silent > _SILENT_S:
            raise EngineGone(f"its process has said nothing for {self._silent} seconds, as if it were stopped")

    async def state(self) -> EngineState:
        """Asks what the engine is doing; raises the error that has ended it."""
        return await self._answer(AskState(), self._asked)

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached pages, once the requests before it have ended; raises what :meth:`state` raises."""
        if error := (await self._answer(ResetCache(), self._resets)).error:
            raise EngineError(error)

    async def _answer(self, question: AskState | ResetCache, asked: deque[asyncio.Future[Any]]) -> Any:
        self.check()
        asked.append(self._loop.create_future())
        self._send(question)
        return await asked[-1]

    def inbox(self) -> Inbox:
        return self._inbox

    def put(self, *messages: Sent) -> None:
        """Sends requests; raises what :meth:`check` raises."""
        self.check()
        self._send(*(NewRequest.of(message) for message, _ in messages if isinstance(message, Add)))

    def abort(self, ids: Sequence[int]) -> None:
        """Ends requests, in any thread, also for a destructor."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, AbortRequests(list(ids)))

    def fail(self, error: EngineError) -> None:
        """The engine has ended: gives the error to all that wait, and to all calls from now on; the first one stays."""
        self._error = self._error or error
        self._inbox.put(Failure(None, self._error))
        for asked in (self._asked, self._resets):
            while asked:
                _answer(asked.popleft(), self._error)

    def _send(self, *messages: Any) -> None:
        if not self._requests.closed:
            self._requests.send(encode(messages))

    def _take(self, message: NewTokens | Failed | EngineState | CacheReset) -> None:
        if isinstance(message, EngineState | CacheReset):
            _answer((self._asked if isinstance(message, EngineState) else self._resets).popleft(), message)
        elif isinstance(message, Failed):
            error = EngineGone(message.message) if message.gone else EngineError(message.message)
            if message.id is None:
                self.fail(error)
            else:
                self._inbox.put(Failure(message.id, error))
        else:
            self._inbox.put(message.step)


def _answer(asked: asyncio.Future[Any], answer: EngineState | CacheReset | EngineError) -> None:
    if not asked.done():  # its task may have been cancelled
        asked.set_exception(answer) if isinstance(answer, EngineError) else asked.set_result(answer)
