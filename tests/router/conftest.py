"""A router with replicas on the loopback, in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dsa_engine.router.app import Router, make_app
from dsa_engine.router.options import RouterOptions
from dsa_engine.router.run import make_client
from servers.loopback import FakeReplica, Listening, listening


class Fleet:
    """Replicas behind a router.

    Attributes:
        replicas, servers: what they answer, and where they listen.
        router: the router, listening at ``url``.
        client: a client of the router.
    """

    def __init__(
        self, replicas: list[FakeReplica], servers: list[Listening], router: Router, url: str, client: httpx.AsyncClient
    ):
        self.replicas, self.servers, self.router, self.url, self.client = replicas, servers, router, url, client

    async def complete(self, prompt: Any = "a", **named: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "m", "prompt": prompt} | named)

    async def until(self, true: Callable[[], Any]) -> None:
        for _ in range(2000):
            if true():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it did not become true within 10 seconds")

    async def check(self) -> None:
        """Checks all replicas now."""
        await asyncio.gather(*map(self.router.replicas.check, self.router.replicas.all))


@asynccontextmanager
async def fleet(replicas: int, **options: Any) -> AsyncIterator[Fleet]:
    fakes = [FakeReplica(str(number)) for number in range(replicas)]
    async with listening(*fakes) as servers:
        urls = [server.url for server in servers]
        given = RouterOptions(replica=urls, **({"health_check_interval": 60.0} | options))
        async with make_client(given) as to_replicas:
            router = Router(given, to_replicas)
            await router.replicas.start()
            try:
                async with (
                    listening(make_app(router)) as (front,),
                    httpx.AsyncClient(base_url=front.url, timeout=20, trust_env=False, verify=False) as client,
                ):
                    yield Fleet(fakes, servers, router, front.url, client)
            finally:
                await router.replicas.stop()


Test = Callable[[Fleet], Awaitable[None]]


@pytest.fixture
def with_fleet() -> Iterator[Callable[..., None]]:
    """``with_fleet(test, replicas, **options)`` runs a coroutine function with a :class:`Fleet`."""

    def run(test: Test, replicas: int = 2, **options: Any) -> None:
        async def inner() -> None:
            async with fleet(replicas, **options) as made:
                await asyncio.wait_for(test(made), 60)
                assert made.router.admission.empty and made.router.admission.outputs == 0
                loads = [made.router.rule.requests(number) for number in range(replicas)]
                assert loads == [0] * replicas, "a request is counted for ever"

        asyncio.run(inner())

    yield run
