"""Runs the router under uvicorn until a signal."""

from __future__ import annotations

import logging
import socket
from typing import Any

import httpx

from dsa_engine.router.app import Router, make_app
from dsa_engine.router.options import RouterOptions
from dsa_engine.server.draining import DrainingServer
from dsa_engine.server.listen import bind

logger = logging.getLogger(__name__)
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


class HttpServer(DrainingServer):
    """Serves the router."""

    def __init__(self, options: RouterOptions, bound: socket.socket):
        self._client = make_client(options)
        self._router = router = Router(options, self._client)
        timeouts = options.body_timeout, options.shutdown_timeout
        super().__init__(make_app(router), router.admission, bound, "router", *timeouts)

    async def startup(self, sockets: Any = None) -> None:
        await self._router.replicas.start()
        await super().startup(sockets)
        replicas = self._router.replicas
        logger.info("%d of %d replicas are ready; routing at %s", len(replicas.usable()), len(replicas.all), self.url)

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await self._router.replicas.stop()
        await self._client.aclose()


def route(options: RouterOptions) -> None:
    """Routes until a signal.

    Raises:
        OSError: the address is in use, or not this machine's.
    """
    with bind(options.host, options.port) as bound:
        HttpServer(options, bound).run()
