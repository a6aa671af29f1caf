"""The HTTP server's end: an engine in another process, for calls in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from dsa_engine.async_calls import AsyncCalls
from dsa_engine.engine.mailbox import EventLoopMailbox, Mailbox, waking_together
from dsa_engine.engine.reply import Reply
from dsa_engine.engine.requests.messages import Add, Run
from dsa_engine.engine.requests.new_request import new_requests
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.errors import EngineError, EngineGone
from dsa_engine.server.messages import (
    AbortRequests,
    AskState,
    EngineFacts,
    EngineState,
    Failed,
    NewRequest,
    NewTokens,
    encode,
    from_engine,
)
from dsa_engine.text.tokenizer import Tokenizer


class EngineClient(AsyncCalls):
    """Does what :class:`dsa_engine.LLM` does in an event loop, with the engine of a :class:`.process.Relay`.

    Text is made here, and stop strings are found here, so the engine's process has little to do for each token. All
    runs in one event loop, between :meth:`connect` and :meth:`close`; it is the entrance of its own calls, see
    :class:`dsa_engine.engine.call.Entrance`.

    Args:
        facts: what is known of the engine.
        folder: with the relay's sockets.
    """

    def __init__(self, facts: EngineFacts, folder: str):
        super().__init__(Path(facts.folder), facts.trust_remote_code, facts.default_sampling)
        self.facts, self._sockets = facts, folder
        self.ids: Iterator[int] = count()
        self.stream_interval = facts.stream_interval
        self._callers = self
        self._error: EngineError | None = None
        self._replies: dict[int, Reply] = {}
        self._asked: deque[EventLoopMailbox] = deque()  # answers come in the order of the questions

    def connect(self) -> None:
        """Begins, in the event loop of all calls."""
        self._loop, self._context = asyncio.get_running_loop(), zmq.asyncio.Context()
        self._tokens = self._context.socket(zmq.PULL)
        self._tokens.set_hwm(0)
        self._tokens.bind(f"ipc://{self._sockets}/tokens")
        self._requests: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        self._requests.set_hwm(0)
        self._requests.connect(f"ipc://{self._sockets}/requests")

    async def receive(self) -> EngineError:
        """Takes what the engine sends, until it ends; returns why."""
        while self._error is None:
            with waking_together():
                for message in from_engine(await self._tokens.recv()):
                    self._take(message)
        return self._error

    def close(self) -> None:
        """Closes the connection; the engine's process ends the requests of this one when it has ended."""
        self._requests.close(linger=100)
        self._tokens.close(linger=0)
        self._context.term()

    def check(self, asynchronous: bool = False) -> None:
        """Raises the error that has ended the engine, if it has ended."""
        if self._error is not None:
            raise self._error

    async def state(self) -> EngineState:
        """Asks what the engine is doing; raises the error that has ended it."""
        self.check()
        mailbox = EventLoopMailbox()
        self._asked.append(mailbox)
        self._send(AskState())
        answer = await mailbox.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def send(self, kind: str, messages: Sequence[tuple[Add | Run, Reply | Mailbox]]) -> None:
        """Sends the requests of a call; raises what :meth:`check` raises."""
        self.check()
        replies = [reply for _, reply in messages if isinstance(reply, Reply)]
        self._replies.update((reply.add.id, reply) for reply in replies)
        self._send(*(NewRequest.of(reply.add) for reply in replies))

    def abort(self, ids: tuple[int, ...]) -> None:
        """Ends requests; a destructor may call it, in any thread."""
        running = [number for number in ids if self._replies.pop(number, None) is not None]
        if running and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send, AbortRequests(running))

    def fail(self, error: EngineError) -> None:
        """The engine has ended: gives the error to all that wait, and to all calls from now on; the first one stays."""
        self._error = self._error or error
        waiting: list[Mailbox] = [*(reply.mailbox for reply in self._replies.values()), *self._asked]
        self._replies.clear()
        self._asked.clear()
        for mailbox in waiting:
            mailbox.put(self._error)

    def _new_requests(self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> list[Add]:
        facts = self.facts
        return new_requests(prompt, params, tokenizer, facts.max_model_len, facts.vocab_size, facts.capacity.check)

    def _send(self, *messages: Any) -> None:
        if not self._requests.closed:
            self._requests.send(encode(messages))

    def _take(self, message: NewTokens | Failed | EngineState) -> None:
        if isinstance(message, EngineState):
            self._asked.popleft().put(message)
        elif isinstance(message, Failed):
            error = EngineGone(message.message) if message.gone else EngineError(message.message)
            if message.id is None:
                self.fail(error)
            elif reply := self._replies.pop(message.id, None):
                reply.mailbox.put(error)
        elif reply := self._replies.get(message.id):  # it may have been aborted meanwhile
            reply.record = message.record
            reply.take(message.tokens, message.ending)
            if reply.ending is not None:
                self._replies.pop(message.id)
                if message.ending is None:  # a stop string
                    self._send(AbortRequests([message.id]))
            reply.hand_over()
