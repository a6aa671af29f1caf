"""JSON as the server writes it: whole answers, and server-sent events."""

from __future__ import annotations

import json
from typing import Any

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


class EventStream:
    """Writes a response of events; ``started`` tells whether its status has been sent."""

    def __init__(self, send: Send):
        self._send = send
        self.started = False

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self.started = True

    async def write(self, *values: Any) -> None:
        """Sends events together."""
        body = b"".join(b"data: %b\n\n" % to_json(value) for value in values)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
