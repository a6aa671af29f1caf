"""The key that clients of a server must send, if it has one."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from dsa_engine.server.errors import ApiError

# Open without a key: what load balancers ask, and the page, which asks its user for the key.
_OPEN = ("/", "/health", "/ping", "/ready", "/version")


class KeyCheck:
    """Refuses requests without ``Authorization: Bearer KEY``; the comparison takes equal time for all wrong keys."""

    def __init__(self, app: ASGIApp, key: str):
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
            code="invalid_api_key",
        )
        await error.response(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if path in _OPEN or path.startswith("/page/"):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._wanted)
