"""Runs the application under uvicorn, until a signal or the end of the engine."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from types import FrameType
from typing import Any

import uvicorn

from dsa_engine.llm import LLM
from dsa_engine.server.app import Server, make_app
from dsa_engine.server.connection import timed_protocol
from dsa_engine.server.errors import ApiError
from dsa_engine.server.listen import url_of
from dsa_engine.server.options import ServerOptions

logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # how often the engine and the running requests are looked at
_END_S = 3.0  # time for requests that were stopped to send their errors
_KEEP_ALIVE_S = 5  # an idle connection is closed after this


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, and then until the running requests have ended, within ``shutdown_timeout``.

    A second signal ends them at once. If the engine ends, so does the server.

    Attributes:
        app_server: what the routes share.
        url: where it listens.
        failed: whether the engine has ended by an error.
    """

    def __init__(self, server: Server, bound: socket.socket):
        options = server.options
        super().__init__(
            uvicorn.Config(
                make_app(server),
                http=timed_protocol(options.body_timeout),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",  # no line for each client that sends something else than HTTP
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(_END_S),
            )
        )
        self.app_server = server
        self.url = url_of(bound)
        self._bound = bound
        self._signals = 0
        self.failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on a signal, in place of uvicorn's handler, which would close the listening socket at once."""
        self._signals += 1

    async def startup(self, sockets: Any = None) -> None:
        # All other ranks must follow before the first request comes.
        await self.app_server.llm.agenerate([])
        await super().startup(sockets)
        self._supervisor = asyncio.ensure_future(self._supervise())
        logger.info("%s is served at %s", ", ".join(self.app_server.names), self.url)

    def run(self, sockets: Any = None) -> None:
        super().run([self._bound])

    async def _supervise(self) -> None:
        """Waits for a signal or the end of the engine; then lets requests end, and the server too."""
        admission = self.app_server.admission
        while not self._signals and self.app_server.alive() is None:
            await asyncio.sleep(_LOOK_S)
        admission.draining = True
        if self._signals:
            await self._drain()
        if (ended := self.app_server.alive()) is not None:
            self.failed = True
            logger.error("%s", ended)
        admission.stop_all(ended or ApiError(503, "the server is shutting down", code="shutting_down"))
        self.should_exit = True

    async def _drain(self) -> None:
        admission, timeout = self.app_server.admission, self.app_server.options.shutdown_timeout
        logger.info("shutting down: running requests have %g seconds to end", timeout)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while not admission.empty and loop.time() < until and self._signals < 2 and self.app_server.alive() is None:
            await asyncio.sleep(_LOOK_S)


def serve(llm: LLM, options: ServerOptions, bound: socket.socket) -> bool:
    """Serves on this rank, at a socket of :func:`.listen.bind`, until a signal; returns False if the engine has ended
    by an error.

    Raises:
        ValueError: an option is not possible.
    """
    http = HttpServer(Server(llm, options), bound)
    http.run()
    return not http.failed


def ignore_signals() -> None:
    """For ranks that follow: the launcher sends them the signal too, and rank 0 tells them when to end."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
