"""The caller's side of a request: its tokens, their text, and how it ended. Exists only where a caller is.

The loop's thread gives an :class:`Inbox` its part of each step, as arrays. The caller's thread, its event loop or its
process gives the tokens to the replies, which make text and pieces of them. A stop string is found there, in the text,
and ends the request for its caller at once; tokens that the engine samples until it learns of it are dropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from dsa_engine.engine.requests.limits import Add
from dsa_engine.engine.requests.request import Ending, Request, RequestRecord
from dsa_engine.engine.requests.samples import Floats, StepTokens, ranked
from dsa_engine.outputs import CompletionOutput, Logprobs, RequestMetrics, Selection, SpeculationMetrics, StreamPiece
from dsa_engine.text.tokenizer import TextStream, Tokenizer


class Failure(NamedTuple):
    """The error that ends a request, or all of an inbox (``id`` None)."""

    id: int | None
    error: BaseException


class Reader(ABC):
    """Takes what the callers of several requests get, from the loop's thread."""

    @abstractmethod
    def put(self, item: StepTokens | Failure, /) -> None: ...

    @abstractmethod
    def begun(self, request: Request) -> None:
        """Called when the engine has a request."""


class Reply:
    """One request as its caller sees it. With a ``stream_interval`` the caller gets pieces: the first token, then so
    many tokens each; with None it gets None at the end. ``deliver``: gives it these, or an exception that it raises."""

    def __init__(
        self,
        add: Add,
        tokenizer: Tokenizer | None,
        deliver: Callable[[Any], object],
        stream_interval: int | None = None,
        index: int = 0,
    ):
        self.add, self.deliver, self.index = add, deliver, index
        self._stream_interval = stream_interval
        self.ending: Ending | None = None  # how the request ended; None while it runs
        self.runs = True  # whether the engine runs it, which has not heard of a stop string
        self.request: Request | None = None  # the engine's, if it is in this process and has been begun
        self.record: RequestRecord | None = None  # set at its end
        self.output: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._given = 0  # number of tokens in earlier pieces
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        params = add.params
        if stream_interval is None and not params.stop_strings and params.logprobs is None:
            add.delivery = "end"
        self._text: TextStream | None = None
        if tokenizer and params.detokenize:
            how = (params.include_stop_str_in_output, params.skip_special_tokens)
            streams = stream_interval is not None
            self._text = TextStream(tokenizer, params.stop_strings, params.min_tokens, *how, streams)

    def take(
        self, tokens: Sequence[int], at: float, ending: Ending | None = None, logprobs: Floats | None = None
    ) -> None:
        """Adds the next tokens, read at a time, up to a stop string; ``ending``: how the request ends with the last of
        them. An error while decoding them to text ends it. The caller gets a piece of a stream, or None at the end."""
        text, params = self._text, self.add.params
        hidden = ending is not None and ending.reason == "stop" and not params.include_stop_str_in_output
        if tokens:
            self._first_token_time = self._first_token_time or at
            self._last_token_time = at
        try:
            for number, token in enumerate(tokens, 1):
                self.output.append(token)
                if logprobs is not None and params.logprobs is not None:
                    self._logprobs.append(ranked(token, logprobs[number - 1].tolist(), params.logprobs))
                    if text is not None:
                        text.decoded(self._logprobs[-1])
                if text is None or (hidden and number == len(tokens)):
                    continue
                text.add(token)
                if text.stop_string is not None:
                    ending = Ending("stop", stop_reason=text.stop_string)
                    break
            self.ending = ending
            if ending is not None and text is not None:
                text.finish()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.ending = ending = _not_decoded("tokens", error)
        if self._stream_interval is None:
            if ending is not None:
                self.deliver(None)
        elif ending is not None or not self._given or len(self.output) - self._given >= self._stream_interval:
            self.deliver(self.piece())

    def piece(self) -> StreamPiece:
        """The tokens since the last piece, and the text that can no longer change."""
        first, self._given = self._given, len(self.output)
        piece = StreamPiece(self._text.new_text() if self._text else "", self.output[first:], index=self.index)
        if self.add.params.logprobs is not None:
            piece.logprobs = self._logprobs[first:]
        if (ending := self.ending) is not None:
            piece.finish_reason, piece.error, piece.stop_reason = ending.reason, ending.error, ending.stop_reason
            piece.metrics, piece.selection = self.metrics(), self._selection()
        return piece

    def _selection(self) -> Selection | None:
        recorded = self._record.selection
        tokens = [recorded[number] for number in range(min(len(recorded), len(self.output)))]
        return Selection.joined(tokens) if tokens else None

    def metrics(self) -> RequestMetrics:
        record, arrival, tokens = self._record, self.add.arrival, len(self.output)
        first, last = record.first_token_at or self._first_token_time, self._last_token_time
        admitted = record.admitted_at
        return RequestMetrics(
            math.nan if first is None else first - arrival,
            None if first is None or last is None or tokens <= 1 else (last - first) / (tokens - 1),
            record.preemptions,
            SpeculationMetrics.of(record.draft_stats) if record.draft_stats else None,
            record.num_cached_tokens or 0,
            None if admitted is None else max(0.0, admitted - arrival),
            *record.rows_by_form,
        )

    def completion(self, index: int) -> CompletionOutput:
        """The whole output of a request that has ended, as number ``index`` of its prompt; not for a stream."""
        assert self.ending is not None
        whole = self.piece()
        logprobs = whole.logprobs
        return CompletionOutput(
            index=index,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=self.ending.reason,
            metrics=self.metrics(),
            stop_reason=whole.stop_reason,
            error=whole.error,
            logprobs=logprobs,
            cumulative_logprob=(
                None if logprobs is None else sum(of[token] for of, token in zip(logprobs, self.output, strict=True))
            ),
            selection=whole.selection,
        )

    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        """Log-probabilities of the prompt's tokens, with their text if there is a tokenizer. An error while decoding
        them ends the request, so this comes before :meth:`completion`."""
        logprobs = self._record.prompt_logprobs
        if logprobs is None or self._text is None:
            return logprobs
        try:
            return [None if of_token is None else self._text.decoded(of_token) for of_token in logprobs]
        except Exception as error:
            self.ending = _not_decoded("prompt's tokens", error)
            return None

    @property
    def _record(self) -> RequestRecord:
        return self.record or (RequestRecord() if self.request is None else self.request.record)


class Inbox(Reader):
    """The replies of requests that run, by id, to which the thread of their callers gives what has come: here, that
    which puts it in. ``abort``: called with the ids of requests that end by a stop string."""

    def __init__(self, abort: Callable[[Sequence[int]], object]):
        self.replies: dict[int, Reply] = {}
        self._abort = abort

    def begun(self, request: Request) -> None:
        if (reply := self.replies.get(request.id)) is not None:
            reply.request = request

    def put(self, item: StepTokens | Failure, /) -> None:
        """Gives replies their tokens, or their error; those of requests that have been aborted are not here."""
        if isinstance(item, Failure):
            for number in [*self.replies] if item.id is None else [item.id]:
                if (reply := self.replies.pop(number, None)) is not None:
                    reply.deliver(item.error)
            return
        replies, stopped = self.replies, []
        rows = repeat(None) if item.logprobs is None else item.logprobs
        of_each = zip(item.ids.tolist(), item.counts.tolist(), item.tokens.tolist(), rows, strict=False)
        for number, count, tokens, logprobs in of_each:
            if (reply := replies.get(number)) is not None:
                reply.take(tokens[:count], item.at, None, logprobs)
                if reply.ending is not None:
                    stopped.append(number)
        for one in item.ended:
            if (reply := replies.pop(one.id, None)) is not None:
                reply.runs, reply.record = False, one.record
                reply.take(one.tokens, item.at, one.ending, one.logprobs)
        if stopped:
            self._abort(stopped)
            for number in stopped:
                replies.pop(number).runs = False


def _not_decoded(what: str, error: BaseException) -> Ending:
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return Ending("error", f"its {what} could not be decoded to text: {kind}{error}")
