"""A request as the API sees it: a sequence of tokens, and the text that they make."""

from __future__ import annotations

from dsa_engine.engine import Engine
from dsa_engine.outputs import RequestMetrics, RequestOutput, StreamPiece
from dsa_engine.sequence import Sequence
from dsa_engine.tokenizer import TextStream, Tokenizer


class Request:
    """Follows a sequence of the engine, whoever calls ``Engine.step``, and ends it at a stop string.

    Args:
        engine: runs the sequence.
        sequence: as ``Engine.add`` returned it.
        tokenizer: None where the model folder has none; the text is then "".
    """

    def __init__(self, engine: Engine, sequence: Sequence, tokenizer: Tokenizer | None):
        self._engine = engine
        self._sequence = sequence
        self._text = (
            TextStream(tokenizer, sequence.params.stop_strings, sequence.params.min_tokens) if tokenizer else None
        )
        self._tokens: list[int] = []  # those taken from the sequence so far
        self.finish_reason: str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self._sequence.prompt)

    @property
    def prompt_computed(self) -> int:
        """Tokens of the prompt that have been prefilled."""
        return min(self._sequence.computed, self.prompt_len)

    @property
    def generated(self) -> int:
        return len(self._tokens)

    def advance(self) -> int:
        """Takes the tokens that are new in the sequence, up to a stop string; returns how many."""
        before = len(self._tokens)
        for token in self._sequence.output[before:]:
            self._tokens.append(token)
            if self._text is not None:
                self._text.add(token)
                if self._text.stopped:
                    self._end("stop")
                    break
        if self.finish_reason is None and self._sequence.finish_reason is not None:
            self.finish_reason = self._sequence.finish_reason
        return len(self._tokens) - before

    def abort(self) -> None:
        """Ends the request where it is, unless it has ended."""
        if self.finish_reason is None:
            self._end("abort")

    def piece(self, tokens: int) -> StreamPiece:
        """The last ``tokens`` tokens, and the text that has become certain with them."""
        text = self._text.new_text(final=self.finish_reason is not None) if self._text else ""
        return StreamPiece(text, self._tokens[len(self._tokens) - tokens :], self.finish_reason)

    def output(self) -> RequestOutput:
        """The finished request."""
        sequence = self._sequence
        assert sequence.first_token is not None and sequence.last_token is not None and self.finish_reason is not None
        return RequestOutput(
            text=self._text.finish() if self._text else "",
            token_ids=self._tokens,
            prompt_token_ids=sequence.prompt,
            finish_reason=self.finish_reason,
            metrics=RequestMetrics.of(sequence.arrival, sequence.first_token, sequence.last_token, len(self._tokens)),
        )

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        if self._sequence.finish_reason is None:
            self._engine.finish(self._sequence, reason)
