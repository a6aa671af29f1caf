"""Runs the router under uvicorn until a signal."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import Any

import httpx
import uvicorn

from dsa_engine.router.app import Router, make_app
from dsa_engine.router.options import RouterOptions
from dsa_engine.server.connection import timed_protocol
from dsa_engine.server.errors import ApiError
from dsa_engine.server.listen import bind, url_of

logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # how often signals and the running requests are looked at
_END_S = 3  # time for requests that were stopped to send their errors
_REUSE_S = 2.0  # an idle connection to a replica is used again within this; servers close theirs after 5 s
_PROBES = [  # a machine that vanishes is noticed within 30 s, also while a response is awaited
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


def make_client(options: RouterOptions) -> httpx.AsyncClient:
    """A client for requests to replicas. The proxies of the environment are for other addresses."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_REUSE_S)
    encrypted = any(url.startswith("https:") for url in options.replica)  # otherwise no certificates are loaded
    transport = httpx.AsyncHTTPTransport(verify=encrypted, limits=limits, socket_options=_PROBES, trust_env=False)
    timeout = httpx.Timeout(None, connect=options.connect_timeout)
    return httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False, verify=encrypted)


class HttpServer(uvicorn.Server):
    """Routes until SIGTERM or Ctrl-C, and then until the running requests have ended, within ``shutdown_timeout``.

    A second signal ends them at once.

    Attributes:
        url: where it listens.
    """

    def __init__(self, options: RouterOptions, bound: socket.socket):
        self._client = make_client(options)
        self._router = Router(options, self._client)
        super().__init__(
            uvicorn.Config(
                make_app(self._router),
                http=timed_protocol(options.body_timeout),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="error",  # no line for each client that sends something else than HTTP
                server_header=False,
                timeout_graceful_shutdown=_END_S,
            )
        )
        self.url = url_of(bound)
        self._bound = bound
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on a signal, in place of uvicorn's handler, which would close the listening socket at once."""
        self._signals += 1

    async def startup(self, sockets: Any = None) -> None:
        await self._router.replicas.start()
        await super().startup(sockets)
        self._supervisor = asyncio.ensure_future(self._supervise())
        replicas = self._router.replicas
        logger.info("%d of %d replicas are ready; routing at %s", len(replicas.usable()), len(replicas.all), self.url)

    def run(self, sockets: Any = None) -> None:
        super().run([self._bound])

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await self._router.replicas.stop()
        await self._client.aclose()

    async def _supervise(self) -> None:
        """Waits for a signal, lets requests end, and then the server."""
        admission, timeout = self._router.admission, self._router.options.shutdown_timeout
        while not self._signals:
            await asyncio.sleep(_LOOK_S)
        admission.draining = True
        logger.info("shutting down: running requests have %g seconds to end", timeout)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while not admission.empty and loop.time() < until and self._signals < 2:
            await asyncio.sleep(_LOOK_S)
        admission.stop_all(ApiError(503, "the router is shutting down", code="shutting_down"))
        self.should_exit = True


def route(options: RouterOptions) -> None:
    """Routes until a signal.

    Raises:
        OSError: the address is in use, or not this machine's.
    """
    with bind(options.host, options.port) as bound:
        HttpServer(options, bound).run()
