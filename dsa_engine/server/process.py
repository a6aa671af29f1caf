"""The engine's end, and the processes of the HTTP server, which that of the engine starts and ends.

Python runs one thread at a time. In the engine's process the events of many streams would delay the launches of the
next step, so HTTP, JSON and text are made in other processes, each with a connection of its own to the engine's.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import zmq

from dsa_engine.engine.calls.jobs import Run
from dsa_engine.engine.calls.reply import Failure, Reader
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import StepTokens
from dsa_engine.llm import LLM
from dsa_engine.server.messages import (
    ENGINE_ENDED,
    STOP,
    AbortRequests,
    CacheReset,
    EngineFacts,
    EngineState,
    Failed,
    NewRequest,
    NewTokens,
    ResetCache,
    Start,
    encode,
    to_engine,
)
from dsa_engine.server.options import BACKLOG, SIGNALS, ServerOptions

logger = logging.getLogger(__name__)
_SILENT_S = 30  # an HTTP process that has said nothing for so long is stopped for good, and killed


class Relay(Reader):
    """Serves the requests of another process until :meth:`close`, which aborts those that run."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self.silent = 0  # seconds since the other process was heard; it says something every second
        self._ids: dict[int, int] = {}  # the engine's ids of requests that run, by the other process's
        self._numbers: dict[int, int] = {}  # and the other way round
        self._folder = TemporaryDirectory(prefix="dsa_engine-")
        self.folder = self._folder.name  # where an :class:`.client.EngineClient` finds the sockets
        self._context = zmq.Context()
        self._tokens, self._requests = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._requests.set_hwm(0)
        self._requests.bind(f"ipc://{self.folder}/requests")
        self._tokens.set_hwm(0)
        self._tokens.connect(f"ipc://{self.folder}/tokens")  # and so messages wait until the other process is there
        self._sending = threading.Lock()  # ZMQ's sockets are for one thread at a time
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._receive, self._beat)]
        for thread in self._threads:
            thread.start()
        llm.loop.at_end.append(self._report_end)

    @property
    def facts(self) -> EngineFacts:
        llm, engine, options = self._llm, self._llm.engine, self._llm.engine.options
        events = engine.scheduler.prefix_cache.events
        return EngineFacts(
            folder=str(llm.folder),
            default_sampling=llm.default_sampling,
            trust_remote_code=options.trust_remote_code,
            model_type=engine.config.model_type,
            limits=engine.limits,
            max_num_seqs=options.max_num_seqs,
            stream_interval=options.stream_interval,
            model=str(options.model),
            pid=os.getpid(),
            cache={name: str(getattr(options, name)) for name in ("kv_cache_dtype", "enable_prefix_caching")},
            kv_events=None if events is None else events.where,
        )

    def close(self) -> None:
        """Ends the requests that run, sends what is to be sent, and closes the sockets."""
        self._closing.set()
        with suppress(ValueError):
            self._llm.loop.at_end.remove(self._report_end)
        self.send([Failed(None, "it has been closed", True)])
        with self._sending:
            self._tokens.close(linger=200)
        self._context.term()  # ends the thread that receives
        for thread in self._threads:  # one that destroys the engine when Python ends would crash it
            thread.join()
        self._abort(list(self._ids))
        self._folder.cleanup()

    def send(self, messages: Sequence[NewTokens | Failed | EngineState | CacheReset]) -> None:
        """Sends messages together, from any thread; after :meth:`close` nothing happens."""
        with self._sending:
            if not self._tokens.closed:
                self._tokens.send(encode(messages))

    def begun(self, request: Request) -> None:
        """No caller here shows its progress."""

    def put(self, item: StepTokens | Failure, /) -> None:
        if isinstance(item, Failure):
            if item.id is not None:  # of the engine's end another message tells
                self.send([Failed.of(self._forget(item.id), item.error)])
            return
        ids = np.fromiter(map(self._numbers.get, item.ids.tolist(), repeat(-1)), np.int64)  # -1: aborted meanwhile
        ended = [one._replace(id=self._forget(one.id)) for one in item.ended]
        self.send([NewTokens(item._replace(ids=ids, ended=ended))])

    def _forget(self, number: int) -> int:
        """The other process's id of a request that has ended."""
        theirs = self._numbers.pop(number, -1)
        self._ids.pop(theirs, None)
        return theirs

    def _receive(self) -> None:
        with self._requests:
            try:
                while True:
                    frame = self._requests.recv()
                    self.silent = 0
                    try:
                        self._take(to_engine(frame))
                    except Exception:
                        logger.exception("a message of an HTTP process is dropped: %.80r", frame)
            except zmq.ContextTerminated:
                pass

    def _take(self, messages: Iterable[Any]) -> None:
        new = []
        for message in messages:
            if isinstance(message, NewRequest):
                number = self._ids[message.id] = next(self._llm.loop.calls.ids)
                self._numbers[number] = message.id
                new.append((message.add(number), self))
            elif isinstance(message, AbortRequests):
                self._abort(message.ids)
            elif isinstance(message, ResetCache):
                self._llm.loop.calls.put((Run(next(self._llm.loop.calls.ids), "reset_prefix_cache", ()), _Reset(self)))
            else:
                self.send([EngineState.of(self._llm.engine)])
        if new:
            self._llm.loop.calls.put(*new)

    def _abort(self, numbers: Iterable[int]) -> None:
        """Ends requests; the loop's thread may end some of them meanwhile."""
        ids = [self._ids.pop(number, None) for number in numbers]
        if running := [number for number in ids if number is not None]:
            for number in running:
                self._numbers.pop(number, None)
            self._llm.loop.calls.abort(running)

    def _report_end(self) -> None:
        error = self._llm.loop.error
        self.send([Failed.of(None, error) if error else Failed(None, "the LLM has been closed", True)])

    def _beat(self) -> None:
        """Tells the other process every second that this one is not stopped."""
        while not self._closing.wait(1.0):
            self.send([])


class _Reset:
    """The mailbox of a job that resets the prefix cache for another process."""

    def __init__(self, relay: Relay):
        self._relay = relay

    def put(self, item: Any, /) -> None:
        self._relay.send([CacheReset(str(item) if isinstance(item, BaseException) else None)])


class HttpProcesses:
    """Processes that serve an engine of this one at one socket; a new connection goes to one of those that are free.

    If one ends, for whatever reason, so do the others. ``relays``, one for each, and ``bound`` are closed here.
    """

    def __init__(self, relays: Sequence[Relay], options: ServerOptions, bound: socket.socket):
        self._relays = relays
        self._shared = TemporaryDirectory(prefix="dsa_engine-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False
        environment = dict(os.environ)
        if len(relays) > 1:
            environment["PROMETHEUS_MULTIPROC_DIR"] = self._shared.name  # prometheus_client then adds up its counts
            Path(self._shared.name, "counts").write_bytes(bytes(8 * len(relays)))
        self._handlers = {number: signal.signal(number, lambda *_: self.stop()) for number in SIGNALS}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a process inherits it, and takes signals when it can
        bound.listen(BACKLOG)
        # It imports what this process does, and nothing that only lies in the working folder.
        program = f"import sys; sys.path[:] = {sys.path}; from dsa_engine.server.http import main; main()"
        for number, relay in enumerate(relays):
            start = Start(relay.facts, relay.folder, asdict(options), bound.fileno(), self._shared.name, number)
            # Its own session: Ctrl-C reaches it through this process only, and once.
            process = subprocess.Popen(
                [sys.executable, "-c", program], env=environment, pass_fds=[bound.fileno()], stdin=subprocess.PIPE,
                bufsize=0, start_new_session=True,
            )  # fmt: skip
            # Not by the command line, which others can read: there may be a key.
            process.stdin.write(msgspec.json.encode(start) + b"\n")  # type: ignore[union-attr]
            self._processes.append(process)
        bound.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if self._stopping:  # a signal came before the last of them
            self.stop()
        self.pids = [process.pid for process in self._processes]

    def wait(self) -> int:
        """Waits for the end of the processes, which get signals of this one; returns the first status that is not 0."""
        ended: SimpleQueue[int] = SimpleQueue()

        def watch(number: int) -> None:
            self._processes[number].wait()
            ended.put(number)

        for number in range(len(self._processes)):
            threading.Thread(target=watch, args=(number,), name="dsa_engine http", daemon=True).start()
        first, running = 0, dict(enumerate(self._relays))
        try:
            while running:
                try:
                    number = ended.get(timeout=1.0)
                except Empty:
                    self._kill_stopped(running)
                    continue
                running.pop(number).close()  # the requests of the process end with it
                status = self._processes[number].returncode
                if status not in (0, ENGINE_ENDED):
                    which = f"{number + 1} of {len(self.pids)} (pid {self.pids[number]})"
                    logger.error("HTTP process %s has ended with status %d, and the server ends with it", which, status)
                first = first or status
                if not self._stopping:
                    self.stop()
            return first
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            for relay in running.values():
                relay.close()
            for process in self._processes:
                if process.stdin is not None:
                    process.stdin.close()
            self._shared.cleanup()

    def _kill_stopped(self, running: Mapping[int, Relay]) -> None:
        """Called every second that this process runs."""
        for number, relay in running.items():
            relay.silent += 1
            if relay.silent == _SILENT_S:
                logger.error("HTTP process %d is killed: nothing for %d seconds", self.pids[number], _SILENT_S)
                self._processes[number].kill()

    def stop(self) -> None:
        """Lets running requests end within ``shutdown_timeout``; called again, ends at once."""
        self._stopping = True
        for process in self._processes:
            with suppress(OSError):  # it has ended
                process.stdin.write(STOP)  # type: ignore[union-attr]  # waits there for a process that begins


def serve(llm: LLM, options: ServerOptions, bound: socket.socket) -> HttpProcesses:
    """Starts ``options.api_server_count`` processes that serve an engine of this one at a socket."""
    return HttpProcesses([Relay(llm) for _ in range(options.api_server_count)], options, bound)
