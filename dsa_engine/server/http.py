"""HTTP: uvicorn, until a signal or the engine's end; the process."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dsa_engine.server.app import Server, make_app
from dsa_engine.server.client import EngineClient
from dsa_engine.server.errors import EngineError, EngineGone
from dsa_engine.server.generation import open_counts
from dsa_engine.server.messages import ENGINE_ENDED, Start
from dsa_engine.server.options import BACKLOG, SIGNALS, ServerOptions
from dsa_engine.system.logs import set_up_logging

logger = logging.getLogger(__name__)
_SILENT_S = 30  # after which a client that has sent a part of a request, or nothing, is no longer awaited
_WHOLE_S = 300  # nor one whose request is not whole then: 16 MiB take so long at 0.5 Mbit/s
_LAST_WORDS_S = 2  # for the events that end streams which outlast the time to finish


def url_of(bound: socket.socket) -> str:
    """``http://127.0.0.1:8000``"""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hosts_of(bound: socket.socket, host: str) -> list[str]:
    """The names that requests may give a server of this machine alone, ``host`` among them; none: any name."""
    here = ipaddress.ip_address(bound.getsockname()[0]).is_loopback
    return sorted({"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host.lower()}) if here else []


class _Connection(HttpToolsProtocol):
    """A connection with a limit of time for what is half sent, and without chunks in HTTP/1.0, which has none."""

    _begun: float | None = None  # when the request that is half sent has begun

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_more()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if (cycle := self.cycle) is None or cycle.scope is not self.scope or cycle.more_body:
            self._await_more()
        else:
            self._begun = None

    def _await_more(self) -> None:
        self._unset_keepalive_if_required()
        now = self.loop.time()
        self._begun = now if self._begun is None else self._begun
        end = min(now + _SILENT_S, self._begun + _WHOLE_S)
        self.timeout_keep_alive_task = self.loop.call_at(end, self.timeout_keep_alive_handler)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if (cycle := self.cycle).scope["http_version"] == "1.0":

            async def send(message: Any) -> None:
                cycle.expected_content_length = len(message.get("body", b""))  # the end is that of the connection
                await RequestResponseCycle.send(cycle, message)

            cycle.chunked_encoding, cycle.send = False, send  # type: ignore[method-assign]


class HttpServer(uvicorn.Server):
    """Serves an engine. On SIGTERM or Ctrl-C running requests have ``shutdown_timeout`` to end; if the engine ends, so
    does the server, which has then ``failed``. ``bound``: a socket of :func:`.options.bind`."""

    def __init__(self, server: Server, bound: socket.socket):
        options: dict[str, Any] = {"timeout_graceful_shutdown": server.options.shutdown_timeout}
        options |= {"lifespan": "off", "http": _Connection, "ws": "none", "server_header": False}
        options |= {"access_log": False, "log_config": None, "log_level": "error"}
        options |= {"backlog": 1}  # connections that a process takes at once, as others may have the next ones
        app = make_app(server, hosts_of(bound, server.options.host))

        async def with_send(scope: Scope, receive: Receive, send: Send) -> None:
            scope["send"] = send  # events need not pass through all that lies around the routes
            await app(scope, receive, send)

        super().__init__(uvicorn.Config(with_send, **options))
        self.app_server, self._bound, self.url = server, bound, url_of(bound)
        self.failed = False
        self._say = logger.info if server.number == 0 else logger.debug  # once for all processes of a server

    def run(self, sockets: Any = None) -> None:
        super().run([self._bound])

    def obey(self, pipe: int) -> None:
        """Ends the server in order at a :data:`.messages.STOP` in a pipe, at once at a second one, and by an error
        when the process of the engine no longer holds the other end."""
        while os.read(pipe, 1):
            self.handle_exit(signal.SIGINT, None)
        error = EngineGone("its process has ended")
        if self.started:
            self._loop.call_soon_threadsafe(self._end, error)
        else:
            self._end(error)

    def _end(self, error: EngineError) -> None:
        self.app_server.llm.fail(error)
        logger.error("the engine has ended: %s", error)
        self.failed = self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # uvicorn's handlers are there now
        self._loop = asyncio.get_running_loop()
        self.app_server.llm.connect()
        self._receiving = asyncio.ensure_future(self._receive())
        await super().startup(sockets)
        self._bound.listen(BACKLOG)
        self._say("%s is served at %s", ", ".join(self.app_server.names), self.url)

    async def _receive(self) -> None:
        self._end(await self.app_server.llm.receive())

    async def shutdown(self, sockets: Any = None) -> None:
        self._say("shutting down: running requests have %g seconds to end", self.app_server.options.shutdown_timeout)
        await super().shutdown(sockets)
        for task in (tasks := self.server_state.tasks.copy()):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
        self._receiving.cancel()
        self.app_server.llm.close()


def main() -> None:
    """Serves the engine that standard input describes, until the other end of standard input is closed."""
    set_up_logging()
    with open(0, "rb", buffering=0, closefd=False) as given:
        start = msgspec.json.decode(given.readline(), type=Start)
    if not start.facts.trust_remote_code:  # transformers would import it, which takes a second, and text needs none
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # of that
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # uvicorn sends itself the signal again when it has ended
    options = ServerOptions(**start.options)
    counts = open_counts(Path(start.shared, "counts")) if options.api_server_count > 1 else None
    server = Server(EngineClient(start.facts, start.folder), options, start.number, counts)
    http = HttpServer(server, socket.socket(fileno=start.listening))
    threading.Thread(target=http.obey, args=(0,), daemon=True).start()
    gc.freeze()  # the collector of cycles took half of the time of an event; what is here stays, what comes has few
    gc.set_threshold(10_000)
    http.run()
    sys.exit(ENGINE_ENDED if http.failed else 0)
