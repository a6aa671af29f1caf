"""What comes of a request, on its caller's side: tokens, their text, how it ended. Only a rank with a caller has it.

The thread of the loop writes it and hands results to the caller; a caller's thread reads nothing of it before the end
but counts. A stop string is found here, in the text, and ends the request for its caller at once: what the engine
samples until it learns of that is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from dsa_engine.engine.requests.messages import Add
from dsa_engine.engine.requests.request import Ending, Request, SampledToken
from dsa_engine.outputs import CompletionOutput, Logprobs, RequestMetrics, SpeculationMetrics, StreamPiece
from dsa_engine.text.stream import TextStream
from dsa_engine.text.tokenizer import Tokenizer


class Mailbox(Protocol):
    """Where a caller waits for its results; any thread may put one in.

    Each reply of a stream puts its pieces; that of another call puts None when it has ended, and a job its tensor. An
    exception is the caller's to raise.
    """

    def put(self, item: Any, /) -> None: ...


class Reply:
    """One request as its caller sees it.

    Attributes:
        add: the request.
        mailbox: of its caller.
        request: the engine's, from when the loop has taken it.
        output: its tokens so far.
        ending: how it has ended; None while it runs.
    """

    def __init__(self, add: Add, tokenizer: Tokenizer | None, mailbox: Mailbox, streams: bool = False):
        self.add = add
        self.mailbox = mailbox
        self._streams = streams
        self.request: Request | None = None
        self.output: list[int] = []
        self.ending: Ending | None = None
        self._logprobs: list[Logprobs] = []
        self._given = 0  # tokens that pieces have had
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        params = add.params
        self._text: TextStream | None = None
        if tokenizer and params.detokenize:
            how = (params.include_stop_str_in_output, params.skip_special_tokens)
            self._text = TextStream(tokenizer, params.stop_strings, params.min_tokens, *how)

    def take(self, tokens: Sequence[SampledToken], ending: Ending | None) -> None:
        """Takes the next tokens of the output, up to a stop string.

        Args:
            ending: how the request ends with the last of them; None if it goes on. Text that cannot be made ends it
                before any other reason, whatever it is that goes wrong there.
        """
        now = time.perf_counter()
        for number, sampled in enumerate(tokens):
            last = ending if number == len(tokens) - 1 else None
            try:
                self.ending = self._take(sampled, last, now)
                if self.ending is not None and self._text is not None:
                    self._text.finish()
            except BaseException as error:  # a panic in Rust is no Exception
                what = f"{type(error).__name__}: {error}"
                self.ending = Ending("error", f"its tokens could not be decoded to text: {what}")
            if self.ending is not None:
                return

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

    def hand_over(self) -> None:
        """Gives the caller what it waits for, if that has come."""
        if self._streams:
            self.mailbox.put(self.piece())
        elif self.ending is not None:
            self.mailbox.put(None)

    def piece(self) -> StreamPiece:
        """What is new since the last piece: tokens, and the text that has become certain."""
        first, self._given = self._given, len(self.output)
        ending = self.ending
        return StreamPiece(
            text=self._text.new_text() if self._text else "",
            token_ids=self.output[first:],
            finish_reason=ending and ending.reason,
            error=ending and ending.error,
            logprobs=None if self.add.params.logprobs is None else self._logprobs[first:],
            stop_reason=ending and ending.stop_reason,
        )

    def completion(self, index: int) -> CompletionOutput:
        """The whole output, once the request has ended, as number ``index`` of its prompt; not of a stream."""
        assert self.ending is not None
        whole, request = self.piece(), self.request
        logprobs = whole.logprobs
        return CompletionOutput(
            index=index,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=self.ending.reason,
            metrics=RequestMetrics.of(
                self.add.arrival,
                self._first_token_time,
                self._last_token_time,
                len(self.output),
                request.preemptions if request else 0,
                SpeculationMetrics.of(request.draft_stats) if request and request.draft_stats else None,
            ),
            stop_reason=whole.stop_reason,
            error=whole.error,
            logprobs=logprobs,
            cumulative_logprob=(
                None if logprobs is None else sum(of[token] for of, token in zip(logprobs, self.output, strict=True))
            ),
        )

    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        """With the text of each token, where text is made."""
        found = self.request.prompt_logprobs if self.request else None
        if found is None or self._text is None:
            return found
        return [None if of is None else self._text.decoded(of) for of in found]
