"""JSON as the server writes it: whole answers, and server-sent events."""

from __future__ import annotations

import json
from typing import Any, Protocol

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx pass events on at once
]

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(value: Any) -> bytes:
    """JSON in UTF-8. Half a surrogate pair, which UTF-8 cannot write, becomes a question mark."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


class ChunkWriter(Protocol):
    """A connection that takes chunks of a response which has been started."""

    async def write_chunk(self, body: bytes) -> None: ...


class EventStream:
    """Writes a response of events; ``started`` tells whether its status has been sent.

    Args:
        connection: writes pieces of the response past the layers behind ``send``, which take longer than all else that
            a token needs here; None if it cannot.
    """

    def __init__(self, send: Send, connection: ChunkWriter | None = None):
        self._send, self._connection = send, connection
        self.started = False

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self.started = True

    async def write(self, *values: Any) -> None:
        """Sends events together."""
        body = b"".join(b"data: %b\n\n" % to_json(value) for value in values)
        if self._connection is not None:
            await self._connection.write_chunk(body)
        else:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
