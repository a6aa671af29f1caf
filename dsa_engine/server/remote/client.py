"""The HTTP server's end: an engine in another process, for calls in an event loop."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from dsa_engine.async_calls import AsyncCalls
from dsa_engine.engine.mailbox import EventLoopMailbox, Mailbox, waking_together
from dsa_engine.engine.reply import Reply
from dsa_engine.engine.requests.messages import Abort, Add, Run
from dsa_engine.engine.requests.new_request import new_requests
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.remote.channel import Channel
from dsa_engine.server.remote.messages import AskState, EngineFacts, EngineState, Failed, NewTokens
from dsa_engine.text.tokenizer import Tokenizer


class EngineClient(AsyncCalls):
    """Does what :class:`dsa_engine.LLM` does in an event loop, with the engine of a :class:`.relay.Relay`.

    Text is made here, and stop strings are found here, so the engine's process has little to do for each token.

    Args:
        connection: to the relay, whose first message is awaited.

    Attributes:
        facts: what is known of the engine.
    """

    def __init__(self, connection: Connection):
        self.facts: EngineFacts = pickle.loads(connection.recv_bytes())
        super().__init__(self.facts.folder, self.facts.trust_remote_code, self.facts.default_sampling)
        self._callers = self._remote = _Remote(connection, self.facts.stream_interval)

    def check(self) -> None:
        """Raises the error that has ended the engine, if it has ended."""
        self._remote.check()

    async def state(self) -> EngineState:
        """Asks what the engine is doing; raises the error that has ended it."""
        return await self._remote.state()

    def close(self) -> None:
        """Closes the connection, and so ends all requests."""
        self._remote.close()

    def _new_requests(self, prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> list[Add]:
        facts = self.facts
        limits = facts.max_model_len, facts.config.vocab_size
        return new_requests(prompt, params, tokenizer, *limits, facts.capacity.check)


class _Remote:
    """The entrance to the engine; see :class:`dsa_engine.engine.call.Entrance`."""

    def __init__(self, connection: Connection, stream_interval: int):
        self.ids: Iterator[int] = count()
        self.stream_interval = stream_interval
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # held while requests begin, and while all that wait get an error
        self._replies: dict[int, Reply] = {}
        self._asked: deque[EventLoopMailbox] = deque()  # answers come in the order of the questions
        self._channel = Channel(connection, self._take, self._closed)
        self._channel.start()

    def check(self, asynchronous: bool = False) -> None:
        if self._error is not None:
            raise self._error

    def send(self, kind: str, messages: Sequence[tuple[Add | Run, Reply | Mailbox]]) -> None:
        replies = [reply for _, reply in messages if isinstance(reply, Reply)]
        with self._lock:
            self.check()
            self._replies.update((reply.add.id, reply) for reply in replies)
        if replies:
            self._channel.send([reply.add for reply in replies])

    def abort(self, ids: tuple[int, ...]) -> None:
        for number in ids:
            self._replies.pop(number, None)
        self._channel.send(Abort(ids))

    async def state(self) -> EngineState:
        mailbox = EventLoopMailbox()
        with self._lock:
            self.check()
            self._asked.append(mailbox)
        self._channel.send(AskState())
        answer = await mailbox.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self._channel.close()

    # In the thread that receives.

    def _take(self, message: Any) -> None:
        if isinstance(message, EngineState):
            self._asked.popleft().put(message)
        elif isinstance(message, Failed):
            self._fail(message.error)
        else:
            with waking_together():
                for one in message:
                    self._hand_over(one)

    def _hand_over(self, one: NewTokens | Failed) -> None:
        assert one.id is not None
        reply = self._replies.get(one.id)
        if reply is None:  # it was aborted meanwhile
            return
        if isinstance(one, Failed):
            self._replies.pop(one.id, None)
            reply.mailbox.put(one.error)
            return
        reply.record = one.record
        reply.take(one.tokens, one.ending)
        if reply.ending is not None:
            self._replies.pop(one.id, None)
            if one.ending is None:  # a stop string
                self._channel.send(Abort((one.id,)))
        reply.hand_over()

    def _closed(self) -> None:
        self._fail(ConnectionError("the process of the engine has ended"))

    def _fail(self, error: BaseException) -> None:
        """Gives an error to all that wait; the first one stays."""
        with self._lock:
            self._error = self._error or error
            waiting: list[Mailbox] = [reply.mailbox for reply in self._replies.values()]
            waiting += self._asked
            self._replies.clear()
            self._asked.clear()
        for mailbox in waiting:
            mailbox.put(self._error)
