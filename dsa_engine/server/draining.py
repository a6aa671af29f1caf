"""uvicorn with an end in order: a signal refuses new requests and lets the running ones finish."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from dsa_engine.server.admission import Admission
from dsa_engine.server.connection import timed_protocol
from dsa_engine.server.errors import ApiError
from dsa_engine.server.listen import url_of

logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # how often signals and the running requests are looked at
_END_S = 3  # time for requests that were stopped to send their errors
_KEEP_ALIVE_S = 5  # an idle connection is closed after this


class DrainingServer(uvicorn.Server):
    """Runs until SIGTERM or Ctrl-C, and then until the running requests have ended, within ``shutdown_timeout``.

    A second signal ends them at once.

    Args:
        app: the application.
        admission: its requests.
        bound: a socket of :func:`.listen.bind`.
        name: what ends, for its errors: "server".
        body_timeout, shutdown_timeout: seconds, see the options.

    Attributes:
        url: where it listens.
        failed: whether an error has ended it, see :meth:`ended`.
    """

    def __init__(
        self,
        app: FastAPI,
        admission: Admission,
        bound: socket.socket,
        name: str,
        body_timeout: float,
        shutdown_timeout: float,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=timed_protocol(body_timeout),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",  # no line for each client that sends something else than HTTP
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_END_S,
            )
        )
        self.url = url_of(bound)
        self.failed = False
        self._admission, self._bound, self._name, self._shutdown_timeout = admission, bound, name, shutdown_timeout
        self._signals = 0

    def ended(self) -> ApiError | None:
        """The error that has ended what is served; None while it works."""
        return None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on a signal, in place of uvicorn's handler, which would close the listening socket at once."""
        self._signals += 1

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._supervisor = asyncio.ensure_future(self._supervise())

    def run(self, sockets: Any = None) -> None:
        super().run([self._bound])

    async def _supervise(self) -> None:
        """Waits for a signal or an error; then lets requests end, and the server too."""
        while not self._signals and self.ended() is None:
            await asyncio.sleep(_LOOK_S)
        self._admission.draining = True
        if self._signals:
            await self._drain()
        if (ended := self.ended()) is not None:
            self.failed = True
            logger.error("%s", ended)
        error = ended or ApiError(503, f"the {self._name} is shutting down", code="shutting_down")
        self._admission.stop_all(error)
        self.should_exit = True

    async def _drain(self) -> None:
        logger.info("shutting down: running requests have %g seconds to end", self._shutdown_timeout)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._shutdown_timeout
        while not self._admission.empty and loop.time() < until and self._signals < 2 and self.ended() is None:
            await asyncio.sleep(_LOOK_S)
