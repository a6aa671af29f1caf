"""Runs the application under uvicorn, until a signal or the end of the engine."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from typing import Any

from dsa_engine.llm import LLM
from dsa_engine.server.app import Server, make_app
from dsa_engine.server.draining import DrainingServer
from dsa_engine.server.errors import ApiError
from dsa_engine.server.options import ServerOptions

logger = logging.getLogger(__name__)


class HttpServer(DrainingServer):
    """Serves an engine. If the engine ends, so does the server.

    Attributes:
        app_server: what the routes share.
    """

    def __init__(self, server: Server, bound: socket.socket):
        options, app = server.options, make_app(server)
        super().__init__(app, server.admission, bound, "server", options.body_timeout, options.shutdown_timeout)
        self.app_server = server

    def ended(self) -> ApiError | None:
        return self.app_server.alive()

    async def startup(self, sockets: Any = None) -> None:
        # All other ranks must follow before the first request comes.
        await self.app_server.llm.agenerate([])
        await super().startup(sockets)
        logger.info("%s is served at %s", ", ".join(self.app_server.names), self.url)


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
