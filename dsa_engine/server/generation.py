"""A response that generates: runs a request on the engine and writes its outputs, whole or as events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, MutableSequence, Sequence
from contextlib import aclosing, contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any, cast

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from dsa_engine.engine.calls.async_calls import PreparedPrompt
from dsa_engine.server.client import EngineClient
from dsa_engine.server.errors import SHUTTING_DOWN, ApiError, bad_request, failed
from dsa_engine.server.forms.form import Form, to_json
from dsa_engine.server.forms.parts import Usage, failure_of
from dsa_engine.server.forms.protocol import StreamOptions
from dsa_engine.server.metrics import Metrics

logger = logging.getLogger(__name__)

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx pass events on at once
]


class ClientLeft(Exception):
    """The client has closed the connection; it gets no answer."""


class Admission:
    """Counts the outputs that run or wait; more than ``limit`` are refused. ``counts``: those of each process of the
    server, of which this is ``number``, in shared memory."""

    def __init__(self, limit: int, number: int = 0, counts: MutableSequence[int] | None = None):
        self.limit, self._number = limit, number
        self.leaving: dict[asyncio.Future[None], str] = {}  # the ends of clients of this process: cancelled, an abort
        self._counts = [0] if counts is None else counts

    @property
    def outputs(self) -> int:
        """Number of outputs that run or wait."""
        return sum(self._counts)

    @contextmanager
    def admit(self, outputs: int) -> Iterator[None]:
        """Lets a request enter for the block; raises :class:`ApiError` if none may enter now."""
        if (running := self.outputs) >= self.limit:
            raise ApiError(
                429, f"{running} requests run or wait, of at most {self.limit}; try again later", code="overloaded"
            )
        self._counts[self._number] += outputs
        try:
            yield
        finally:
            self._counts[self._number] -= outputs


def open_counts(file: Path) -> MutableSequence[int]:
    """The int64 in a file, in shared memory: one for each process, which alone writes it, so it takes no lock."""
    with open(file, "r+b") as opened:
        return cast("MutableSequence[int]", memoryview(mmap(opened.fileno(), 0)).cast("q"))


class Generation(Response):
    """Answers one request, within ``timeout_s`` if there is a limit."""

    def __init__(
        self,
        llm: EngineClient,
        form: Form,
        prepared: Sequence[PreparedPrompt],
        admission: Admission,
        metrics: Metrics,
        timeout_s: float | None = None,
    ):
        self._llm, self._form, self._prepared, self._admission, self._metrics = llm, form, prepared, admission, metrics
        self._timeout_s = timeout_s
        self._unfinished = len(form.prompts) * form.params.n  # outputs
        self._lengths: list[list[int]] = [[] for _ in prepared]  # tokens of outputs that have ended, of each prompt
        self._started = False  # whether the status of a stream has been sent
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = None
        try:
            with self._admission.admit(self._unfinished), self._counting():
                work = self._stream(send, scope.get("send", send)) if self._form.asked.stream else self._whole()
                body = await self._or_departure(work, receive)
        except ClientLeft:
            return
        except asyncio.CancelledError:
            error = SHUTTING_DOWN
        except ApiError as refusal:
            error = refusal
        except (ValueError, TypeError) as refusal:
            error = bad_request(refusal, self._form.asked.model_fields_set)
        except Exception as unforeseen:
            logger.exception("a request failed")
            error = failed(unforeseen)
        if error is not None and not self._started:
            await error.response(scope["path"])(scope, receive, send)
        elif self._started:
            last = body if error is None else self._form.failed(error)
            end = {"type": "http.response.body", "body": last + self._form.end_of_stream, "more_body": False}
            await scope.get("send", send)(end)
        else:
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _or_departure(self, work: Coroutine[Any, Any, bytes], receive: Receive) -> bytes:
        """Does the work, unless the client leaves before or its time is over: then its requests are aborted."""
        running, gone = asyncio.ensure_future(work), asyncio.ensure_future(_departure(receive))
        self._admission.leaving[gone] = self._form.asked.request_name
        try:
            await asyncio.wait((running, gone), timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            if gone.cancelled():
                raise ApiError(499, "the request was aborted by /abort_requests", code="aborted")
            if gone.done():
                raise ClientLeft
            limit = f"{self._timeout_s:g} seconds (--request-timeout)"
            raise ApiError(504, f"the request took more than {limit}", code="timeout")
        finally:
            del self._admission.leaving[gone]
            gone.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Counts the outputs that an error or a cancellation in the block has ended. Refused ones do not count."""
        try:
            yield
        except (ValueError, TypeError):
            raise
        except BaseException as error:
            aborted = isinstance(error, (asyncio.CancelledError, ApiError, ClientLeft))
            self._metrics.unfinished(self._unfinished, "abort" if aborted else "error")
            raise

    async def _whole(self) -> bytes:
        outputs, form = await self._llm.outputs_of(self._prepared), self._form
        usage = Usage(form.prompt_ids, form.params.n)
        for number, one in enumerate(outputs):
            for output in one.outputs:
                usage.add(number * form.params.n + output.index, output)
                self._finished(number, output.index, output, len(output.token_ids))
        if reason := failure_of(output for one in outputs for output in one.outputs):
            raise ApiError(500, f"an output failed: {reason}")
        return to_json(form.whole(outputs) | {"usage": form.usage(usage.form)})

    async def _stream(self, send: Send, send_events: Send) -> bytes:
        form, n = self._form, self._form.params.n
        show = form.asked.stream_options or StreamOptions()
        continuous = show.include_usage and show.continuous_usage_stats
        usage, times = Usage(form.prompt_ids, n), [0.0] * self._unfinished  # when tokens of each output came last
        async with aclosing(self._llm.pieces_of(self._prepared)) as together:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            self._started = True
            async for pieces in together:
                events, now, unfinished = [], time.perf_counter(), self._unfinished
                for piece in pieces:
                    index, ending, tokens = piece.index, piece.finish_reason, len(piece.token_ids)
                    before = form.usage(usage.form) if continuous else None
                    usage.add(index, piece)
                    if tokens and times[index]:
                        self._metrics.came(tokens, now - times[index])
                    times[index] = now
                    if ending is not None:
                        self._finished(*divmod(index, n), piece, usage.output_tokens[index])
                    for chunk in form.chunks(piece) if ending != "error" else ():
                        if continuous:
                            begins = "role" in chunk["choices"][0].get("delta", ())  # before the first token
                            chunk["usage"] = before if begins else form.usage(usage.form)
                        events.append(form.event(chunk))
                reason = failure_of(pieces) if self._unfinished < unfinished else None
                if not self._unfinished and reason is None:
                    return b"".join([*events, *map(form.event, form.last(usage.form))])  # in one packet with the end
                if events:
                    await send_events({"type": "http.response.body", "body": b"".join(events), "more_body": True})
                if reason is not None:
                    raise ApiError(500, f"an output failed: {reason}")
        return b""

    def _finished(self, number: int, index: int, output: Any, tokens: int) -> None:
        """Counts output ``index`` of prompt ``number``."""
        self._unfinished -= 1
        add, lengths = self._prepared[number].adds[0], self._lengths[number]
        self._metrics.finished(output.metrics, output.finish_reason, 0 if index else len(add.prompt_ids), tokens)
        lengths.append(tokens)
        if len(lengths) == self._form.params.n:
            self._metrics.answered(add.params.max_tokens or 0, lengths)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
