"""HTTP servers on this machine's loopback, in the test's own process and event loop, and a replica to be routed to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send


class Listening:
    """An application at a port, until :meth:`stop`; it may be started again at the same port."""

    def __init__(self, app: Any):
        self._app, self.port = app, 0
        self._server: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = uvicorn.Config(self._app, port=self.port, lifespan="off", log_config=None, ws="none")
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup()
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes all connections, also those that have a request."""
        if self._server is not None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            for server in self._server.servers:  # uvicorn's own shutdown sleeps a while
                server.close()
                await server.wait_closed()
            self._server = None


@asynccontextmanager
async def listening(*apps: Any) -> AsyncIterator[list[Listening]]:
    """Starts servers for the block."""
    servers = [Listening(app) for app in apps]
    try:
        for server in servers:
            await server.start()
        yield servers
    finally:
        for server in servers:
            await server.stop()


class FakeReplica:
    """Answers any request with ``parts``, as told by its attributes.

    Attributes:
        requests: path and query, headers and body of those that came, without health checks.
        status, content_type, parts: the answer.
        readiness: status of ``/ready``; of ``/health`` too, where ``has_ready`` is False.
        gate: is waited for before the first part; ``gate_later`` before the second.
        breaks_after: number of parts after which the connection is closed; None: never.
        gone: is set when a client has left.
    """

    def __init__(self, name: str = "replica"):
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.status, self.content_type = 200, "application/json"
        self.parts = [f'{{"by": "{name}"}}'.encode()]
        self.readiness, self.has_ready = 200, True
        self.gate: asyncio.Event | None = None
        self.gate_later: asyncio.Event | None = None
        self.breaks_after: int | None = None
        self.gone = asyncio.Event()

    def streams(self, *parts: bytes) -> None:
        self.content_type, self.parts = "text/event-stream; charset=utf-8", list(parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in ("/ready", "/health"):
            there = self.has_ready or scope["path"] == "/health"
            await self._start(send, self.readiness if there else 404)
            await send({"type": "http.response.body", "body": b""})
            return
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode()) * bool(scope["query_string"])
        self.requests.append((target, headers, bytes(body)))
        answer = asyncio.ensure_future(self._answer(send))
        departure = asyncio.ensure_future(self._left(receive))
        await asyncio.wait([answer, departure], return_when=asyncio.FIRST_COMPLETED)
        for task in (answer, departure):
            task.cancel()

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def _start(self, send: Send, status: int) -> None:
        headers = [(b"content-type", self.content_type.encode()), (b"x-from", b"the replica"), (b"keep-alive", b"9")]
        if status in (429, 503):
            headers.append((b"retry-after", b"7"))
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _answer(self, send: Send) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await self._start(send, self.status)
        for number, part in enumerate(self.parts):
            if self.breaks_after == number:
                return
            if number == 1 and self.gate_later is not None:
                await self.gate_later.wait()
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
