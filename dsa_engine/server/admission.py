"""Which requests may run, and what ends them early: a client that leaves, a limit of time, the end of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from starlette.types import Receive

from dsa_engine.server.errors import ApiError


class ClientLeft(Exception):
    """The client has closed the connection; it gets no answer."""


class Admission:
    """Counts the requests that run or wait.

    Args:
        limit: number of outputs, running and waiting, at which further requests are refused.
        timeout_s: time of a request, from its admission; None: no limit.

    Attributes:
        draining: whether new requests are refused, because the server ends.
        outputs: outputs that run or wait, and requests that are being read.
    """

    def __init__(self, limit: int, timeout_s: float | None):
        self.limit, self.timeout_s = limit, timeout_s
        self.draining = False
        self.outputs = 0
        self._running: set[Admitted] = set()

    def check(self) -> None:
        """Raises :class:`ApiError` if no request may enter now."""
        if self.draining:
            raise ApiError(503, "the server is shutting down; send the request to another one, or later")
        if self.outputs >= self.limit:
            raise ApiError(
                429, f"{self.outputs} requests run or wait, of at most {self.limit}; try again later", code="overloaded"
            )

    @contextmanager
    def entering(self) -> Iterator[None]:
        """The time in which a request is read and checked; raises what :meth:`check` raises."""
        self.check()
        self.outputs += 1
        try:
            yield
        finally:
            self.outputs -= 1

    def admit(self, outputs: int, receive: Receive) -> Admitted:
        """Lets a request enter: ``with admission.admit(…):`` around its work. Raises what :meth:`check` raises."""
        self.check()
        return Admitted(self, outputs, receive)

    @property
    def empty(self) -> bool:
        return not self._running

    def stop_all(self, error: Exception) -> None:
        """Ends all requests with this error."""
        for one in list(self._running):
            one.stop(error)

    def enter(self, one: Admitted) -> None:
        self._running.add(one)
        self.outputs += one.outputs

    def leave(self, one: Admitted) -> None:
        self._running.discard(one)
        self.outputs -= one.outputs


class Admitted:
    """A request that runs: a context in whose task it is computed.

    Leaving the context raises the error with which the request was stopped.
    """

    def __init__(self, admission: Admission, outputs: int, receive: Receive):
        self._admission, self.outputs, self._receive = admission, outputs, receive
        self._error: Exception | None = None

    def stop(self, error: Exception) -> None:
        """Ends the request soon: cancels its task, from which ``error`` is then raised."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    async def __aenter__(self) -> Admitted:
        self._admission.enter(self)
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.ensure_future(self._until_client_leaves())
        limit, self._timer = self._admission.timeout_s, None
        if limit is not None:
            error = ApiError(504, f"the request took more than {limit:g} seconds (--request-timeout)", code="timeout")
            self._timer = asyncio.get_running_loop().call_later(limit, self.stop, error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.leave(self)
        self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._error is None:
            return
        cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if not cancelled:  # the work had just ended; the cancellation comes at the next wait
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        if hasattr(self._task, "uncancel"):  # since Python 3.11
            self._task.uncancel()
        if cancelled or kind is None:
            raise self._error

    async def _until_client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientLeft())
