"""The engine's end, and the process of the HTTP server, which that of the engine starts and ends.

Python runs one thread at a time. In the engine's process the events of many streams would delay the launches of the
next step, so HTTP, JSON and text are made in a process of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import msgspec
import zmq

from dsa_engine.engine.mailbox import WokenMailbox
from dsa_engine.engine.reply import Receiver, RequestRecord
from dsa_engine.engine.requests.messages import Abort, Add
from dsa_engine.engine.requests.request import Ending, SampledToken
from dsa_engine.llm import LLM
from dsa_engine.server.app import Server
from dsa_engine.server.client import EngineClient
from dsa_engine.server.http import HttpServer
from dsa_engine.server.messages import (
    AbortRequests,
    EngineFacts,
    EngineState,
    Failed,
    NewRequest,
    NewTokens,
    encode,
    to_engine,
)
from dsa_engine.server.options import ServerOptions
from dsa_engine.system.logs import set_up_logging

logger = logging.getLogger(__name__)
_ENGINE_ENDED = 1  # exit status; the process has said so
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Relay(WokenMailbox):
    """Serves the requests of another process until :meth:`close`, which aborts those that run. Holds the results of a
    step until they are complete, and sends them as one message.

    Args:
        llm: serves calls of any thread: on several ranks, the others follow.

    Attributes:
        folder: where an :class:`.client.EngineClient` finds the sockets.
    """

    def __init__(self, llm: LLM):
        super().__init__()
        self._llm, self.reader = llm, self
        self._ids: dict[int, int] = {}  # the engine's ids of requests that run, by the other process's
        self._folder = TemporaryDirectory(prefix="dsa_engine-")
        self.folder = self._folder.name
        self._context = zmq.Context()
        self._tokens, self._requests = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._requests.set_hwm(0)
        self._requests.bind(f"ipc://{self.folder}/requests")
        self._tokens.set_hwm(0)
        self._tokens.connect(f"ipc://{self.folder}/tokens")  # and so messages wait until the other process is there
        self._sending = threading.Lock()  # ZMQ's sockets are for one thread at a time
        self._receiver = threading.Thread(target=self._receive, name="dsa_engine requests", daemon=True)
        self._receiver.start()
        threading.Thread(target=self._report_end, name="dsa_engine watch", daemon=True).start()

    @property
    def facts(self) -> EngineFacts:
        llm, engine, options = self._llm, self._llm.engine, self._llm.engine.options
        return EngineFacts(
            folder=str(llm.folder),
            default_sampling=llm.default_sampling,
            trust_remote_code=options.trust_remote_code,
            model_type=engine.config.model_type,
            vocab_size=engine.config.vocab_size,
            capacity=engine.scheduler.capacity,
            max_model_len=engine.max_model_len,
            max_num_seqs=options.max_num_seqs,
            stream_interval=options.stream_interval,
            model=str(options.model),
            pid=os.getpid(),
        )

    def close(self) -> None:
        """Ends the requests that run, sends what is to be sent, and closes the sockets."""
        self.send(Failed(None, "it has been closed", True))
        with self._sending:
            self._tokens.close(linger=200)
        self._context.term()  # ends the thread that receives
        self._receiver.join()
        self._abort(list(self._ids))
        self._folder.cleanup()

    def send(self, *messages: NewTokens | Failed | EngineState) -> None:
        """Sends messages together, from any thread; after :meth:`close` nothing happens."""
        self._items.extend(messages)
        self.wake([])

    def wake(self, filled: Sequence[WokenMailbox]) -> None:
        with self._sending:
            items = [self._items.popleft() for _ in range(len(self._items))]
            if items and not self._tokens.closed:
                self._tokens.send(encode(items))

    def ended(self, number: int) -> None:
        """Called when a request has ended, with the other process's id."""
        self._ids.pop(number, None)

    def _receive(self) -> None:
        with self._requests:
            try:
                while True:
                    self._take(to_engine(self._requests.recv()))
            except zmq.ContextTerminated:
                pass

    def _take(self, messages: Iterable[Any]) -> None:
        new = []
        for message in messages:
            if isinstance(message, NewRequest):
                number = self._ids[message.id] = next(self._llm.engine.ids)
                add = message.add(number)
                new.append((add, RelayedRequest(add, message.id, self)))
            elif isinstance(message, AbortRequests):
                self._abort(message.ids)
            else:
                self.send(EngineState.of(self._llm.engine))
        if new:
            self._llm.loop.send(*new)

    def _abort(self, numbers: Iterable[int]) -> None:
        """Ends requests; the loop's thread may end some of them meanwhile."""
        ids = [self._ids.pop(number, None) for number in numbers]
        if running := tuple(number for number in ids if number is not None):
            self._llm.loop.send((Abort(running), None))

    def _report_end(self) -> None:
        """Waits for the end of the engine, and tells the other process."""
        try:
            self._llm.loop.wait()
        except BaseException as error:
            self.send(Failed.of(None, error))
        else:
            self.send(Failed(None, "the LLM has been closed", True))


class RelayedRequest(Receiver):
    """A request whose caller is in another process; it is its own mailbox, which gets the error that ends it.

    Args:
        number: the other process's id of the request.
    """

    def __init__(self, add: Add, number: int, relay: Relay):
        super().__init__(add, self)
        self._number, self._relay = number, relay

    def take(self, tokens: Sequence[SampledToken], ending: Ending | None) -> None:
        self.ending = ending
        if ending is not None:
            self._relay.ended(self._number)
        record = None if ending is None else RequestRecord.of(self.request)
        self._new = NewTokens(self._number, tokens, ending, record)

    def hand_over(self) -> None:
        self._relay.put(self._new)

    def put(self, error: BaseException, /) -> None:
        self._relay.put(Failed.of(self._number, error))


class HttpProcess:
    """A process that serves an engine of this one.

    Args:
        llm: on several ranks, all others follow; until they do, this waits.
        bound: a socket of :func:`.http.bind`, which is closed here.

    Attributes:
        pid: of the process.
    """

    def __init__(self, llm: LLM, options: ServerOptions, bound: socket.socket):
        asyncio.run(llm.agenerate([]))  # the others must follow before the first request comes
        self._relay = relay = Relay(llm)
        with bound:
            # Its own session: Ctrl-C reaches it through this process only, and once.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                pass_fds=[bound.fileno()], stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            start = _Start(relay.facts, relay.folder, asdict(options), bound.fileno())
        assert self._process.stdin is not None
        # Not by the command line, which others can read: there may be a key. Stays open as long as this process lives.
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._process.stdin.flush()
        self.pid = self._process.pid

    def wait(self) -> int:
        """Waits for the end of the process, to which signals are passed on meanwhile; returns its exit status."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
        try:
            status = self._process.wait()
            if status not in (0, _ENGINE_ENDED):
                logger.error("the process of the HTTP server has ended with status %d", status)
            return status
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._relay.close()
            if self._process.stdin is not None:
                self._process.stdin.close()

    def stop(self) -> None:
        """Lets running requests end within ``shutdown_timeout``; called again, ends at once."""
        self._process.send_signal(signal.SIGINT)


class _Start(msgspec.Struct):
    """What the process of the HTTP server reads first."""

    facts: EngineFacts
    folder: str
    options: dict[str, Any]
    listening: int


def main() -> None:
    """Serves the engine that standard input describes, until the other end of standard input is closed."""
    set_up_logging()
    with open(0, "rb", buffering=0, closefd=False) as given:
        start = msgspec.json.decode(given.readline(), type=_Start)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # uvicorn sends itself the signal again when it has ended
    server = Server(EngineClient(start.facts, start.folder), ServerOptions(**start.options))
    http = HttpServer(server, socket.socket(fileno=start.listening))
    threading.Thread(target=http.end_with, args=(0,), daemon=True).start()
    http.run()
    sys.exit(_ENGINE_ENDED if http.failed else 0)


if __name__ == "__main__":
    main()
