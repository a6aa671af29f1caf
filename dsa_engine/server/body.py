"""The body of a request: read within limits of size and time, and parsed from JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from dsa_engine.server.errors import ApiError
from dsa_engine.system.sizes import format_bytes

_BODIES = 8  # bodies of the maximum size that may be held at once


class BodyReader:
    """Reads bodies.

    Args:
        max_bytes: of one body.
        timeout_s: time in which a body must have come.
    """

    def __init__(self, max_bytes: int, timeout_s: float):
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._held = 0  # bytes of all bodies that are being read or parsed

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The object in a request's body; its bytes count as memory in use until the block is left. Keys whose value
        is null are left out, as if they had not been given.

        Raises:
            ApiError: it is too large, too slow, or no JSON object.
        """
        raw = bytearray()
        try:
            await asyncio.wait_for(self._fill(raw, request), self._timeout_s)
            yield parse_object(raw)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {self._timeout_s:g} seconds; send it faster") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before the end of its body") from None
        finally:
            self._held -= len(raw)

    async def _fill(self, raw: bytearray, request: Request) -> None:
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_bytes):
            raise self._too_large()
        async for part in request.stream():
            raw += part
            self._held += len(part)
            if len(raw) > self._max_bytes:
                raise self._too_large()
            if self._held > _BODIES * self._max_bytes:
                raise ApiError(429, "too many large bodies are on their way; try again later", code="overloaded")

    def _too_large(self) -> ApiError:
        size = format_bytes(self._max_bytes)
        return ApiError(413, f"the body is larger than {size}; send less, or start the server with --max-body-size")


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The JSON object that ``raw`` is, without the keys whose value is null; raises :class:`ApiError`."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not a {type(value).__name__}")
    return {key: one for key, one in value.items() if one is not None}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
