"""Errors in OpenAI's form or Anthropic's, for every failure of a request; what refuses one before it is read."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsa_engine.config.checks import shown
from dsa_engine.errors import ContextLengthError
from dsa_engine.system.sizes import format_bytes

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Anthropic's, where they are others.
_MESSAGES_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
_PATHS = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /tokenize and /detokenize, as "
    "models here write text"
)
MAX_BODY_BYTES = 16 << 20
_RETRY_AFTER = {"Retry-After": "1"}  # seconds that a client is told to wait before it tries again


class ApiError(HTTPException):
    """An error that the client gets. ``param``: the parameter at fault, if it is one; ``code``: a word for programs,
    such as "model_not_found"."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(status, message, _RETRY_AFTER if status in (429, 503) else None)
        self.param, self.code = param, code

    def body(self, path: str = "") -> dict[str, Any]:
        """In the form of the API that has the path."""
        status = self.status_code
        if path.startswith("/v1/messages"):
            kind = (_TYPES | _MESSAGES_TYPES).get(status, "invalid_request_error" if status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.detail}}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status_code, self.headers)


SHUTTING_DOWN = ApiError(503, "the server ends, and has cut what was running; try again later", code="shutdown")


class EngineError(RuntimeError):
    """The error that has ended a request in the engine's process, or the engine."""


class EngineGone(EngineError):
    """The engine has ended, or a rank of it, or its process is stopped."""


def bad_request(error: Exception, names: Any = ()) -> ApiError:
    """The answer to a ``ValueError`` or ``TypeError`` of a request; ``names``: the parameters it was given."""
    message = str(error)
    param = next((name for name in names if isinstance(name, str) and message.startswith(f"{name} ")), None)
    return ApiError(400, message, param, "context_length_exceeded" if isinstance(error, ContextLengthError) else None)


def failed(error: BaseException) -> ApiError:
    """The answer to an error that is the server's own."""
    if isinstance(error, EngineGone):
        return ApiError(503, f"the engine of this server does not answer: {error}; try again later")
    what = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return ApiError(500, f"the server failed: {what}")


def add_handlers(app: FastAPI) -> None:
    """Answers errors of routes, of bodies and of routing itself."""

    @app.exception_handler(HTTPException)
    async def expected(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            return error.response(request.url.path)
        words = {
            404: f"there is nothing at {request.url.path}; there are {_PATHS}",
            405: f"{request.url.path} does not take {request.method}",
        }
        said = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
        response = said.response(request.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def of_body(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"][1:])) if first["type"] != "json_invalid" else ""
        message = first["msg"].removeprefix("Value error, ")
        if name == "" and isinstance(first["input"], bytes):  # FastAPI has not read it
            kind = shown(request.headers.get("content-type", ""))
            words = f"the body's content type is {kind}; send JSON, with the header Content-Type: application/json"
            return ApiError(415, words).response(request.url.path)
        if first["type"] == "json_invalid":
            message = f"the body is not valid JSON: {first['ctx']['error']}"
        elif name:
            message = f"{name}: {message}" + ("" if first["type"] == "missing" else f", not {shown(first['input'])}")
        return ApiError(400, message, name.partition(".")[0] or None).response(request.url.path)

    @app.exception_handler(EngineError)
    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return failed(error).response(request.url.path)


class KeyCheck(HTTPBearer):
    """Refuses requests without ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; the comparison takes equal time for
    all wrong keys."""

    def __init__(self, key: str):
        super().__init__(auto_error=False)
        self._key = key.encode()

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        bearer = await super().__call__(request)
        given = (bearer.credentials if bearer else "", request.headers.get("x-api-key", ""))
        if not any(hmac.compare_digest(one.encode(), self._key) for one in given):
            words = (
                "the API key is missing or wrong; send it as the header Authorization: Bearer KEY, or x-api-key: KEY"
            )
            raise ApiError(401, words, code="invalid_api_key")


class HostCheck:
    """Refuses requests for other hosts than ``hosts``: a page of another site may lead a name of its own to this
    machine (DNS rebinding), and its reader's browser then sends it here."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if not self._hosts or not host or re.sub(r":\d*$", "", host.lower()) in self._hosts:
            return await self._app(scope, receive, send)
        words = f"the header Host is {shown(host)}, this server is {', '.join(self._hosts)}; a proxy sends one of these"
        await ApiError(400, words).response(scope["path"])(scope, receive, send)


class BodyLimit:
    """Refuses bodies of more than :data:`MAX_BODY_BYTES`."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise ApiError(413, f"the body is larger than {format_bytes(MAX_BODY_BYTES)}; send less")
            return message

        try:
            await self._app(scope, limited, send)
        except asyncio.CancelledError:  # the server ends, and waits no longer for the rest of a body
            await SHUTTING_DOWN.response(scope["path"])(scope, receive, send)
