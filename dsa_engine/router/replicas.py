"""The replicas: which of them may get requests, and the checks that say so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import httpx

from dsa_engine.router.options import RouterOptions

logger = logging.getLogger(__name__)
_FAILURES = 3  # checks in a row without an answer in time
_ENDPOINTS = ("/ready", "/health")  # the second where the first does not exist

State = Literal["unknown", "ready", "not ready", "dead"]


@dataclass(eq=False)
class Replica:
    """A server.

    Attributes:
        number: its number, from 0, in the rule and in ``/workers``.
        url: without a slash at its end.
        state: "unknown" until the first check; "not ready": it answers, but takes no requests now.
        draining: whether it gets no new requests because of a call to ``/workers``.
    """

    number: int
    url: str
    state: State = "unknown"
    draining: bool = False
    check_soon: asyncio.Event = field(default_factory=asyncio.Event)
    _failures: int = 0

    @property
    def usable(self) -> bool:
        return self.state == "ready" and not self.draining


class Replicas:
    """All replicas, each with a task that checks it from :meth:`start` to :meth:`stop`.

    Args:
        options: URLs and times.
        client: sends the checks.
        lost_cache: called with a replica that has died.
    """

    def __init__(self, options: RouterOptions, client: httpx.AsyncClient, lost_cache: Callable[[Replica], None]):
        self.all = [Replica(number, url.rstrip("/")) for number, url in enumerate(options.replica)]
        self._options, self._client, self._lost_cache = options, client, lost_cache
        self._tasks: list[asyncio.Task[None]] = []

    def usable(self) -> list[int]:
        """Numbers of the replicas that may get a request."""
        return [replica.number for replica in self.all if replica.usable]

    async def start(self) -> None:
        """Checks every replica once, and then again and again."""
        await asyncio.gather(*map(self.check, self.all))
        self._tasks = [asyncio.ensure_future(self._watch(replica)) for replica in self.all]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def check(self, replica: Replica) -> None:
        """Asks a replica whether it is ready, and sets its state."""
        try:
            status = await asyncio.wait_for(self._status(replica), self._options.health_check_timeout)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            replica._failures += 1
            if replica._failures >= _FAILURES or replica.state == "unknown":
                self.died(replica, f"{replica._failures} checks had no answer in time")
        except Exception as error:
            self.died(replica, _words(error))
        else:
            replica._failures = 0
            self._set(replica, "ready" if status < 300 else "not ready", f"it answers {status}")

    def died(self, replica: Replica, reason: str) -> None:
        """A replica cannot be reached: it gets no requests until a check succeeds, and its cache is lost."""
        self._lost_cache(replica)
        self._set(replica, "dead", reason)

    async def _status(self, replica: Replica) -> int:
        status = 404
        for endpoint in _ENDPOINTS:
            response = await self._client.send(httpx.Request("GET", replica.url + endpoint))
            status = response.status_code
            if status not in (404, 405):
                break
        return status

    async def _watch(self, replica: Replica) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(replica.check_soon.wait(), self._options.health_check_interval)
            replica.check_soon.clear()
            await self.check(replica)

    def _set(self, replica: Replica, state: State, reason: str) -> None:
        if replica.state != state:
            level = logging.INFO if state == "ready" else logging.WARNING
            logger.log(level, "replica %d, %s, is %s: %s", replica.number, replica.url, state, reason)
        replica.state = state


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
