"""Runs the application under uvicorn, until a signal or the end of the engine."""

from __future__ import annotations

import logging
import socket
from typing import Any

from dsa_engine.server.app import Server, make_app
from dsa_engine.server.draining import DrainingServer
from dsa_engine.server.errors import ApiError

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
        await super().startup(sockets)
        logger.info("%s is served at %s", ", ".join(self.app_server.names), self.url)
