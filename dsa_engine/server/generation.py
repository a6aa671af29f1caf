"""A response that generates: runs a request on the engine and writes its outputs, whole or as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from dsa_engine.outputs import RequestOutput, StreamPiece
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.server.admission import Admission, ClientLeft
from dsa_engine.server.connection import CHUNKS
from dsa_engine.server.errors import ApiError, bad_request, failed
from dsa_engine.server.events import EventStream, to_json
from dsa_engine.server.forms.usage import StreamUsage, failure_of, usage_of
from dsa_engine.server.metrics import Metrics
from dsa_engine.server.remote.client import EngineClient

logger = logging.getLogger(__name__)


class Form(Protocol):
    """How an endpoint writes outputs.

    Attributes:
        prompts: what the engine gets.
        params: the same for all prompts.
        stream: whether outputs are sent as they come.
        include_usage, continuous_usage: whether a last chunk, or every chunk, has the usage.
        names: the parameters of the request, for its errors.
    """

    prompts: list[dict[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    names: tuple[str, ...]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of an answer, without its usage."""
        ...

    def begin(self, prompts: Sequence[list[int]]) -> None:
        """Called with the token ids of the prompts before the first piece."""
        ...

    def chunks(self, piece: StreamPiece) -> list[dict[str, Any]]:
        """The chunks of a stream that a piece makes, without usage; none if it has nothing to show."""
        ...

    def empty_chunk(self) -> dict[str, Any]:
        """A chunk without choices, which carries the usage."""
        ...


class Generation(Response):
    """Answers one request.

    Args:
        llm: the engine.
        form: the endpoint's.
    """

    def __init__(self, llm: EngineClient, form: Form, admission: Admission, metrics: Metrics):
        self._llm, self._form, self._admission, self._metrics = llm, form, admission, metrics
        self._unfinished = len(form.prompts) * form.params.n  # outputs
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send, scope.get("extensions", {}).get(CHUNKS, {}).get("writer"))
        error: ApiError | None = None
        try:
            async with self._admission.admit(self._unfinished, receive):
                with self._counting():
                    if self._form.stream:
                        await self._stream(events)
                    else:
                        body = await self._whole()
        except ClientLeft:
            return
        except ApiError as refusal:
            error = refusal
        except (ValueError, TypeError) as refusal:
            error = bad_request(refusal, self._form.names)
        except Exception as unforeseen:
            logger.exception("a request failed")
            error = failed(unforeseen)
        if error is not None and not events.started:
            await error.response(scope, receive, send)
        elif self._form.stream:
            await self._end(events, error)
        else:
            await Response(body, media_type="application/json")(scope, receive, send)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Counts the outputs that an error or a cancellation in the block has ended. Refused ones do not count."""
        try:
            yield
        except (ValueError, TypeError):
            raise
        except BaseException as error:
            aborted = isinstance(error, (asyncio.CancelledError, ApiError))
            self._metrics.unfinished(self._unfinished, "abort" if aborted else "error")
            raise

    async def _end(self, events: EventStream, error: ApiError | None) -> None:
        if error is not None:
            await events.write(error.body)
        await events.end()

    async def _whole(self) -> bytes:
        outputs = await self._llm.agenerate(self._form.prompts, self._form.params)
        for one in outputs:
            for number, output in enumerate(one.outputs):
                self._finished(output, 0 if number else len(one.prompt_token_ids), len(output.token_ids))
        if reason := failure_of(output for one in outputs for output in one.outputs):
            raise ApiError(500, f"an output failed: {reason}")
        return to_json(self._form.whole(outputs) | {"usage": usage_of(outputs)})

    async def _stream(self, events: EventStream) -> None:
        form, n = self._form, self._form.params.n
        prompts, pieces = await self._llm.prepare_streams(form.prompts, form.params)
        form.begin(prompts)
        usage = StreamUsage(prompts, n)
        counts = [0] * self._unfinished
        async with aclosing(pieces):
            await events.start()
            async for piece in pieces:
                usage.add(piece)
                counts[piece.index] += len(piece.token_ids)
                if piece.finish_reason is not None:
                    prompt_tokens = 0 if piece.index % n else len(prompts[piece.index // n])
                    self._finished(piece, prompt_tokens, counts[piece.index])
                if reason := failure_of([piece]):
                    raise ApiError(500, f"an output failed: {reason}")
                chunks = form.chunks(piece)
                if form.continuous_usage:
                    chunks = [chunk | {"usage": usage.form} for chunk in chunks]
                if chunks:
                    await events.write(*chunks)
        if form.include_usage:
            await events.write(form.empty_chunk() | {"usage": usage.form})

    def _finished(self, output: Any, prompt_tokens: int, output_tokens: int) -> None:
        self._unfinished -= 1
        self._metrics.finished(output.metrics, output.finish_reason, prompt_tokens, output_tokens)
