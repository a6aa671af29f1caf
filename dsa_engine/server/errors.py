"""Errors in OpenAI's form, for every failure of a request."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dsa_engine.parallel.failure import is_transport_error

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_PATHS = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize and /detokenize, as models here write text"
RETRY_AFTER_S = 1  # what a client is told to wait before it tries again


class ApiError(Exception):
    """An error that the client gets.

    Args:
        status: the HTTP status.
        message: what was given, what is allowed and what to do.
        param: the parameter at fault, if it is one.
        code: a word for programs, such as "model_not_found".
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None
        return JSONResponse(self.body, self.status, headers)


def bad_request(error: Exception, names: Any = ()) -> ApiError:
    """The answer to a ``ValueError`` or ``TypeError`` of a request; ``names``: the parameters it was given."""
    message = str(error)
    param = next((name for name in names if isinstance(name, str) and message.startswith(f"{name} ")), None)
    return ApiError(400, message, param)


def add_handlers(app: FastAPI) -> None:
    """Answers errors of routes, and of routing itself, in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def own(request: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> JSONResponse:
        words = {
            404: f"there is nothing at {request.url.path}; there are {_PATHS}",
            405: f"{request.url.path} does not take {request.method}",
        }
        response = ApiError(error.status_code, words.get(error.status_code, str(error.detail))).response
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return failed(error).response


def failed(error: BaseException) -> ApiError:
    """The answer to an error that is the server's own."""
    if is_transport_error(error) or isinstance(
        error, ConnectionError
    ):  # a collective broke, or the engine's process ended
        return ApiError(
            503, "a rank of this server has ended or does not answer, and so the server ends; try again later"
        )
    return ApiError(500, f"the server failed: {type(error).__name__}: {error}")
