"""A request on its way: sent to a replica, sent to another one if that fails, and its response passed on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

import httpx
from starlette.types import Scope, Send

from dsa_engine.router.metrics import Metrics
from dsa_engine.router.replicas import Replicas
from dsa_engine.router.rule import Prompt, Rule, Sent
from dsa_engine.server.errors import ApiError

logger = logging.getLogger(__name__)
_OTHER_REPLICA = (429, 502, 503)  # statuses after which another replica is tried
_BROKEN_TRIES = 2  # replicas that a request may be sent to and that then break the connection

# Headers that concern one connection (RFC 9110, 7.6.1), and those that each side writes itself.
_OWN_HEADERS = {
    b"connection",
    b"content-length",
    b"date",
    b"expect",
    b"host",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"server",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
Headers = list[tuple[bytes, bytes]]


class _Answer:
    """A response whose body has begun, or which has none."""

    def __init__(self, sent: Sent, response: httpx.Response, parts: AsyncIterator[bytes], first: bytes):
        self.sent, self.response, self.parts, self.first = sent, response, parts, first


class Forwarder:
    """Sends requests to replicas.

    Args:
        replicas, rule, metrics: the router's.
        client: without a limit of connections, and without a time limit for reading.
    """

    def __init__(self, replicas: Replicas, rule: Rule, metrics: Metrics, client: httpx.AsyncClient):
        self._replicas, self._rule, self._metrics, self._client = replicas, rule, metrics, client

    async def forward(self, scope: Scope, send: Send, prompt: Prompt, body: bytes) -> None:
        """Passes a request on, and its response back. The caller's cancellation ends the request at the replica.

        Raises:
            ApiError: no replica can answer, or the replica has broken off its response.
        """
        answer = await self._answer(scope, prompt, body)
        try:
            await self._pass_on(answer, send)
        finally:
            self._rule.end(answer.sent)
            await answer.response.aclose()

    async def _answer(self, scope: Scope, prompt: Prompt, body: bytes) -> _Answer:
        """The first answer of a replica that is worth passing on; the last refusal if there is none."""
        tried: set[int] = set()
        broken = 0
        refusal: _Answer | None = None
        try:
            while (usable := set(self._replicas.usable()) - tried) and broken < _BROKEN_TRIES:
                replica = self._rule.choose(prompt, usable)
                tried.add(replica)
                try:
                    answer = await self._send(scope, prompt, body, replica)
                except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
                    raise ApiError(400, f"the request cannot be passed on: {error}") from None
                except httpx.HTTPError as error:
                    broken += not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                    self._failed(replica, error)
                    continue
                if refusal is not None:
                    await refusal.response.aclose()
                    refusal = None
                if answer.response.status_code not in _OTHER_REPLICA:
                    return answer
                refusal = answer
                self._metrics.failed(replica, str(answer.response.status_code))
        except BaseException:
            if refusal is not None:
                await refusal.response.aclose()
            raise
        if refusal is not None:
            return refusal
        if broken:
            raise ApiError(502, "replicas broke the connection after they had the request; try again", code="broken")
        raise ApiError(503, f"no replica can take a request now: {self._states()}", code="no_replica")

    async def _send(self, scope: Scope, prompt: Prompt, body: bytes, replica: int) -> _Answer:
        """Sends the request to a replica and waits for the first byte of the response's body."""
        url = self._replicas.all[replica].url + _target(scope)
        request = httpx.Request(scope["method"], url, headers=_passed_on(scope["headers"]), content=body)
        sent = self._rule.send(prompt, replica)
        began, refused = time.perf_counter(), True
        response: httpx.Response | None = None
        try:
            response = await self._client.send(request, stream=True)
            parts = response.aiter_raw()
            first = await anext(parts, b"")
            refused = response.status_code >= 400
            self._metrics.first_byte(sent, response.status_code, time.perf_counter() - began)
        except BaseException as error:
            # A client that leaves during the prefill: what is computed by then stays cached.
            self._rule.end(sent, refused=not isinstance(error, asyncio.CancelledError))
            if response is not None:
                await response.aclose()
            raise
        if refused:
            self._rule.end(sent, refused=True)
        else:
            self._rule.first_byte(sent)
        return _Answer(sent, response, parts, first)

    async def _pass_on(self, answer: _Answer, send: Send) -> None:
        response, replica = answer.response, answer.sent.replica
        headers = _passed_on(response.headers.raw)
        if length := response.headers.get("content-length"):
            headers.append((b"content-length", length.encode()))
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        part = answer.first
        while part:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            try:
                part = await anext(answer.parts, b"")
            except httpx.HTTPError as error:
                self._metrics.broken(replica)
                self._lost(replica, error)
                raise ApiError(502, "the replica broke off its answer; ask again", code="broken") from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failed(self, replica: int, error: httpx.HTTPError) -> None:
        """Before the first byte: the request goes on to another replica."""
        self._metrics.failed(replica, type(error).__name__)
        if isinstance(error, httpx.ConnectError):
            self._replicas.died(self._replicas.all[replica], f"{type(error).__name__}: {error}")
        self._lost(replica, error)

    def _lost(self, replica: int, error: httpx.HTTPError) -> None:
        """The connection broke. An idle one may do that on its own, so a check says whether the replica is dead."""
        logger.warning("replica %d, %s: %s: %s", replica, self._replicas.all[replica].url, type(error).__name__, error)
        self._replicas.all[replica].check_soon.set()

    def _states(self) -> str:
        states = {
            f"{one.url} is {'draining' if one.draining and one.state == 'ready' else one.state}"
            for one in self._replicas.all
            if not one.usable
        }
        return ", ".join(sorted(states)) or "all have refused it"


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers but for those of the connection, and those that ``Connection`` names."""
    headers = list(headers)
    named = {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }
    return [(name, value) for name, value in headers if name.lower() not in _OWN_HEADERS | named]


def _target(scope: Scope) -> str:
    """Path and query, as the client wrote them."""
    if ".." in scope["path"].split("/"):
        raise ApiError(404, f"there is nothing at {scope['path']}")
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    path, query = path.partition(b"?")[0], scope["query_string"]
    target = path + b"?" + query if query else path
    with suppress(UnicodeDecodeError):
        return target.decode("ascii")
    raise ApiError(400, "the path holds characters that are not ASCII; write them as %XX")
