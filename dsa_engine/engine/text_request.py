"""A request as the API sees it: its tokens, and the text that they make."""

from __future__ import annotations

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.request import Request
from dsa_engine.outputs import RequestMetrics, RequestOutput, StreamPiece
from dsa_engine.tokenizer import TextStream, Tokenizer


class TextRequest:
    """Follows a request of the engine, whoever calls ``Engine.step``, and ends it at a stop string.

    An error in making its text ends this request only, with ``finish_reason`` "error".

    Args:
        engine: runs the request.
        request: as ``Engine.add`` returned it.
        tokenizer: None where the model folder has none; the text is then "".
    """

    def __init__(self, engine: Engine, request: Request, tokenizer: Tokenizer | None):
        self._engine = engine
        self._request = request
        self._text = (
            TextStream(tokenizer, request.params.stop_strings, request.params.min_tokens) if tokenizer else None
        )
        self._text_failed = False  # then what was certain before is all there is
        self._tokens: list[int] = []  # those taken from the request so far
        self.finish_reason: str | None = None
        self.error: str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self._request.prompt)

    @property
    def prompt_computed(self) -> int:
        """Tokens of the prompt that have been prefilled."""
        return min(self._request.num_computed_tokens, self.prompt_len)

    @property
    def generated(self) -> int:
        return len(self._tokens)

    @property
    def preemptions(self) -> int:
        return self._request.preemptions

    def advance(self) -> int:
        """Takes the tokens that are new in the request, up to a stop string; returns how many."""
        before = len(self._tokens)
        try:
            for token in self._request.output[before:]:
                self._tokens.append(token)
                if self._text is not None:
                    self._text.add(token)
                    if self._text.stopped:
                        self._end("stop")
                        break
            if self.finish_reason is None and self._request.finish_reason is not None:
                if self._text is not None:
                    self._text.finish()
                self.finish_reason, self.error = self._request.finish_reason, self._request.error
        except Exception as error:
            self._text_failed = True
            self._end("error", f"its tokens could not be decoded to text: {type(error).__name__}: {error}")
        return len(self._tokens) - before

    def abort(self) -> None:
        """Ends the request where it is, unless it has ended."""
        if self.finish_reason is None:
            self._end("abort")

    def piece(self, tokens: int) -> StreamPiece:
        """The last ``tokens`` tokens, and the text that has become certain with them."""
        first = len(self._tokens) - tokens
        return StreamPiece(
            text=self._new_text(),
            token_ids=self._tokens[first:],
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=self._logprobs(first),
        )

    def output(self) -> RequestOutput:
        """The finished request; not for one that is streamed."""
        request = self._request
        assert self.finish_reason is not None
        logprobs = self._logprobs(0)
        return RequestOutput(
            text=self._new_text(),
            token_ids=self._tokens,
            prompt_token_ids=request.prompt,
            finish_reason=self.finish_reason,
            metrics=RequestMetrics.of(
                request.arrival, request.first_token, request.last_token, len(self._tokens), request.preemptions
            ),
            error=self.error,
            logprobs=logprobs,
            cumulative_logprob=(
                None if logprobs is None else sum(of[token] for of, token in zip(logprobs, self._tokens, strict=True))
            ),
        )

    def _new_text(self) -> str:
        """The text that has become certain since the last call."""
        if self._text is None:
            return ""
        return self._text.new_text(final=self.finish_reason is not None and not self._text_failed)

    def _logprobs(self, first: int) -> list[dict[int, float]] | None:
        if self._request.params.logprobs is None:
            return None
        return self._request.logprobs[first : len(self._tokens)]

    def _end(self, reason: str, error: str | None = None) -> None:
        if self._request.finish_reason is None:
            self._engine.finish(self._request, reason, error)
        self.finish_reason, self.error = reason, error  # last: until then, abort() would still do the above
