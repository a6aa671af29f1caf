"""The application: routes, admission, and how a request's prompt comes to be known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dsa_engine.config.checks import shown
from dsa_engine.router.forward import Forwarder
from dsa_engine.router.metrics import Metrics
from dsa_engine.router.options import RouterOptions
from dsa_engine.router.prompts import BLOCK_TOKENS, prompt_of
from dsa_engine.router.replicas import Replicas
from dsa_engine.router.rule import Prompt, Rule
from dsa_engine.server.admission import Admission, ClientLeft
from dsa_engine.server.body import BodyReader
from dsa_engine.server.errors import ApiError, add_handlers
from dsa_engine.server.events import to_json
from dsa_engine.server.key import KeyCheck
from dsa_engine.system.sizes import parse_bytes
from dsa_engine.version import __version__

logger = logging.getLogger(__name__)
_ROUTED = ("/v1/chat/completions", "/v1/completions")  # by their prefixes
_POSTED = ("/tokenize", "/detokenize")
_ASKED = ("/", "/page/{path:path}", "/v1/models", "/v1/models/{name:path}", "/version")
_LONG_BYTES = 1 << 16  # the digests of longer bodies are made in a thread


class Router:
    """What the routes share.

    Args:
        options: the router's.
        client: sends requests to replicas.
    """

    def __init__(self, options: RouterOptions, client: httpx.AsyncClient):
        self.options = options
        self.rule = Rule(len(options.replica), cached_tokens=options.replica_cache_tokens, block_tokens=BLOCK_TOKENS)
        self.replicas = Replicas(options, client, lambda replica: self.rule.forget(replica.number))
        self.metrics = Metrics(self.replicas, self.rule)
        self.forwarder = Forwarder(self.replicas, self.rule, self.metrics, client)
        self.admission = Admission(options.max_concurrent_requests, options.request_timeout)
        self.bodies = BodyReader(parse_bytes(options.max_body_size, "max_body_size"), options.body_timeout)

    @property
    def ready(self) -> bool:
        return not self.admission.draining and bool(self.replicas.usable())


class _Forwarded(Response):
    """A response that comes from a replica."""

    def __init__(self, router: Router):
        self._router = router
        self.background = None
        self._started = self._events = False
        self._tail = b""  # the last bytes that were sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            self._note(message)
            await send(message)

        router = self._router
        try:
            with router.admission.entering():
                prompt, body = await self._read(_RecordingRequest(scope, receive))
            async with router.admission.admit(1, receive):
                await router.forwarder.forward(scope, noted, prompt, body)
        except ClientLeft:
            pass
        except ApiError as error:
            if not self._started:
                await error.response(scope, receive, send)
            elif self._events and self._tail.endswith((b"\n\n", b"\r\n\r\n")):
                body = b"data: %b\n\n" % to_json(error.body)
                await send({"type": "http.response.body", "body": body, "more_body": False})
            # Anything else that is cut is left without an end: the connection closes, and the client sees it.

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._events = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        else:
            self._tail = (self._tail + message["body"][-4:])[-4:]

    async def _read(self, request: _RecordingRequest) -> tuple[Prompt, bytes]:
        if request.method == "GET":
            return Prompt(tokens=1), b""
        async with self._router.bodies.read(request) as body:
            if request.url.path not in _ROUTED:
                return Prompt(tokens=1), bytes(request.raw)
            if len(request.raw) < _LONG_BYTES:
                return prompt_of(body), bytes(request.raw)
            return await asyncio.to_thread(prompt_of, body), bytes(request.raw)


class _RecordingRequest(Request):
    """A request whose body is also there as it came, in ``raw``."""

    def __init__(self, scope: Scope, receive: Receive):
        super().__init__(scope, receive)
        self.raw = bytearray()

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        async for part in super().stream():
            self.raw += part
            yield part


def make_app(router: Router) -> FastAPI:
    """The application."""
    app = FastAPI(title="dsa_engine router", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_handlers(app)

    async def forwarded() -> Response:
        return _Forwarded(router)

    for path in (*_ROUTED, *_POSTED):
        app.add_api_route(path, forwarded, methods=["POST"])
    for path in _ASKED:
        app.add_api_route(path, forwarded, methods=["GET"])

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        return Response() if router.ready else ApiError(503, "no replica can take a request now").response

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_workers(app, router)
    if router.options.api_key is not None:
        app.add_middleware(KeyCheck, key=router.options.api_key)
    return app


def _add_workers(app: FastAPI, router: Router) -> None:
    """The calls of an operator, for clients on this machine only: a client's key is no operator's."""

    def described(number: int) -> dict[str, Any]:
        replica, rule = router.replicas.all[number], router.rule
        return {
            "id": number,
            "url": replica.url,
            "state": replica.state,
            "draining": replica.draining,
            "requests": rule.requests(number),
            "waiting_tokens": rule.waiting_tokens(number),
        }

    @app.get("/workers")
    async def workers(request: Request) -> dict[str, Any]:
        _check_local(request)
        return {"workers": [described(replica.number) for replica in router.replicas.all]}

    @app.put("/workers/{number}")
    async def set_worker(number: str, request: Request) -> dict[str, Any]:
        _check_local(request)
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(router.replicas.all):
            count = len(router.replicas.all)
            raise ApiError(404, f"there is no worker {shown(number)}; they are numbered from 0 to {count - 1}")
        async with router.bodies.read(request) as body:
            draining = body.get("draining")
        if not isinstance(draining, bool):
            raise ApiError(400, f'draining must be true or false, as in {{"draining": true}}, not {shown(draining)}')
        replica = router.replicas.all[int(number)]
        replica.draining = draining
        logger.info("replica %d, %s, %s", replica.number, replica.url, "drains" if draining else "drains no longer")
        return described(int(number))


def _check_local(request: Request) -> None:
    host = request.client.host if request.client is not None else ""
    try:
        local = ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ApiError(403, "/workers answers only on the router's own machine")
