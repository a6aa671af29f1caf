"""The caller's side of a request: its tokens, their text, and how it ended. Exists only on ranks with a caller.

The loop's thread writes a reply and puts results into the mailbox of the caller, whose thread reads only counters
before the end. A stop string is found here, in the text, and ends the request for its caller at once; tokens that the
engine samples until it learns of it are dropped.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from dsa_engine.engine.requests.limits import Add
from dsa_engine.engine.requests.request import Ending, Request, SampledToken
from dsa_engine.outputs import CompletionOutput, Logprobs, RequestMetrics, Selection, SpeculationMetrics, StreamPiece
from dsa_engine.text.tokenizer import TextStream, Tokenizer


class RequestRecord(NamedTuple):
    """The fields of a request that its outputs show, see :class:`.request.Request`."""

    preemptions: int = 0
    draft_stats: Sequence[tuple[int, int]] = ()
    num_cached_tokens: int | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    admitted_at: float | None = None
    rows_by_form: tuple[int, int, int] = (0, 0, 0)
    selection: dict[int, Selection] = {}

    @classmethod
    def of(cls, request: Request | None) -> RequestRecord:
        return cls() if request is None else cls(*(getattr(request, name) for name in cls._fields))


class Mailbox(Protocol):
    """Takes a caller's results; any thread may put one in, and the caller raises an exception that it receives."""

    def put(self, item: Any, /) -> None: ...


@dataclass(eq=False)
class Receiver(ABC):
    """Receives the tokens of one request from the loop."""

    add: Add
    mailbox: Mailbox
    delivery: Literal["tokens", "end"] = "tokens"  # what it takes before the end, see ``Request.delivery``
    request: Request | None = field(default=None, init=False)  # the engine's; None until the loop has begun it
    ending: Ending | None = field(default=None, init=False)  # how the request ended; None while it runs

    @abstractmethod
    def take(self, tokens: Sequence[SampledToken], ending: Ending | None) -> None:
        """Takes the next tokens, and puts what the caller waits for into the mailbox; ``ending``: how the request ends
        with the last of them, None if it goes on."""

    def put(self, error: BaseException, /) -> None:
        self.mailbox.put(error)


class Reply(Receiver):
    """One request as its caller sees it. With a ``stream_interval`` the caller gets pieces: the first token, then so
    many tokens each; with None it waits for the end."""

    def __init__(
        self,
        add: Add,
        tokenizer: Tokenizer | None,
        mailbox: Mailbox,
        stream_interval: int | None = None,
        index: int = 0,
    ):
        super().__init__(add, mailbox)
        self.index = index
        self._stream_interval = stream_interval
        self.output: list[int] = []
        self.record: RequestRecord | None = None  # of a request in another process; set with its last tokens
        self._logprobs: list[Logprobs] = []
        self._given = 0  # number of tokens in earlier pieces
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        params = add.params
        if stream_interval is None and not params.stop_strings and params.logprobs is None:
            self.delivery = "end"
        self._text: TextStream | None = None
        if tokenizer and params.detokenize:
            how = (params.include_stop_str_in_output, params.skip_special_tokens)
            streams = stream_interval is not None
            self._text = TextStream(tokenizer, params.stop_strings, params.min_tokens, *how, streams)

    def take(self, tokens: Sequence[SampledToken], ending: Ending | None) -> None:
        """Adds the tokens up to a stop string. An error while decoding them to text ends the request. The mailbox gets
        a piece of a stream, or None at the end."""
        now = time.perf_counter()
        for number, sampled in enumerate(tokens):
            last = ending if number == len(tokens) - 1 else None
            try:
                self.ending = self._take(sampled, last, now)
                if self.ending is not None and self._text is not None:
                    self._text.finish()
            except BaseException as error:
                self.ending = _not_decoded("tokens", error)
            if self.ending is not None:
                break
        if self._stream_interval is None:
            if self.ending is not None:
                self.mailbox.put(None)
        elif self.ending is not None or not self._given or len(self.output) - self._given >= self._stream_interval:
            self.mailbox.put(self.piece())

    def _take(self, sampled: SampledToken, ending: Ending | None, now: float) -> Ending | None:
        if sampled.error is not None:
            return ending
        self.output.append(sampled.token)
        self._first_token_time = self._first_token_time or now
        self._last_token_time = now
        text, params = self._text, self.add.params
        if sampled.logprobs is not None:
            self._logprobs.append(sampled.logprobs)
            if text is not None:
                self._logprobs[-1] = text.decoded(sampled.logprobs)
        if text is None:
            return ending
        if ending is None or ending.reason != "stop" or params.include_stop_str_in_output:
            text.add(sampled.token)
        return Ending("stop", stop_reason=text.stop_string) if text.stopped else ending

    def piece(self) -> StreamPiece:
        """The tokens since the last piece, and the text that can no longer change."""
        first, self._given = self._given, len(self.output)
        ending = self.ending
        return StreamPiece(
            text=self._text.new_text() if self._text else "",
            token_ids=self.output[first:],
            finish_reason=ending and ending.reason,
            error=ending and ending.error,
            logprobs=None if self.add.params.logprobs is None else self._logprobs[first:],
            stop_reason=ending and ending.stop_reason,
            index=self.index,
            metrics=ending and self.metrics(),
            selection=ending and self._selection(),
        )

    def _selection(self) -> Selection | None:
        recorded = self._record.selection
        tokens = [recorded[number] for number in range(min(len(recorded), len(self.output)))]
        return Selection.joined(tokens) if tokens else None

    def metrics(self) -> RequestMetrics:
        record, arrival, tokens = self._record, self.add.arrival, len(self.output)
        first, last, admitted = self._first_token_time, self._last_token_time, record.admitted_at
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
        return self.record or RequestRecord.of(self.request)


def _not_decoded(what: str, error: BaseException) -> Ending:
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return Ending("error", f"its {what} could not be decoded to text: {kind}{error}")
