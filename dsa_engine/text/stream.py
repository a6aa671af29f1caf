"""Text that grows token by token and ends at a stop string."""

from __future__ import annotations

from dsa_engine.outputs import Logprob, Logprobs
from dsa_engine.text.tokenizer import Tokenizer

# Maximum number of tokens whose text is held back because they may still become a character.
_MAX_PENDING = 12


class TextStream:
    """Turns a growing list of tokens into text, ends it at a stop string, and releases text once it is final.

    A character may need several tokens, and a stop string may span several; text that could still change is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens  # their text is not searched for stop strings
        self._include_stop = include_stop  # the text ends after the stop string, not before it
        self._skip_special_tokens = skip_special_tokens
        self._searched = 0  # text before this is not searched
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text can no longer change
        self._window = 0  # decoding starts here, before the settled tokens, to keep spaces between words
        self._text = ""
        self._given = 0
        self._finished = False
        self.stop_string: str | None = None  # the one that the text has reached

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self.stop_string is not None

    def decoded(self, logprobs: Logprobs) -> Logprobs:
        """``logprobs`` with the text of each token."""
        return {
            token: Logprob(value, value.rank, self._tokenizer.token_text(token)) for token, value in logprobs.items()
        }

    def _decode(self, tokens: list[int]) -> str:
        if self._skip_special_tokens:
            return self._tokenizer.decode(tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def add(self, token: int) -> None:
        """Appends a token; :attr:`stopped` tells whether the text has reached a stop string."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._settled])
        after = self._decode(self._tokens[self._window :])
        settled = len(self._tokens)
        if after.endswith("\ufffd"):  # an unfinished character
            if settled - self._settled < _MAX_PENDING:
                return
            settled, after = self._whole_characters()
        first = max(self._searched, len(self._text) - max((len(s) for s in self._stop), default=0))
        self._text += after[len(before) :]
        self._window, self._settled = self._settled, settled
        if len(self._tokens) <= self._min_tokens:
            self._searched = len(self._text)
            return
        stops = [(p, s) for s in self._stop if (p := self._text.find(s, first)) >= 0]
        if stops:
            first, self.stop_string = min(stops, key=lambda stop: stop[0])
            self._text = self._text[: first + (len(self.stop_string) if self._include_stop else 0)]

    def _whole_characters(self) -> tuple[int, str]:
        """How many tokens can be settled although some never complete a character, and the text of the window.

        A character has at most 4 bytes and a token at least one, so bytes that are no character after 4 more tokens
        never will be. Without this, every further token would decode all of them again.
        """
        last = len(self._tokens) - 4
        for end in range(len(self._tokens) - 1, self._settled, -1):
            text = self._decode(self._tokens[self._window : end])
            if not text.endswith("\ufffd"):
                return end, text
        return last, self._decode(self._tokens[self._window : last])

    def finish(self) -> str:
        """Ends the stream and returns the whole text; an unfinished character at the end is decoded as it is."""
        if not self.stopped and self._settled < len(self._tokens):
            before = self._decode(self._tokens[self._window : self._settled])
            self._text += self._decode(self._tokens[self._window :])[len(before) :]
            self._settled = len(self._tokens)
        self._finished = True
        return self._text

    def new_text(self) -> str:
        """The text that became final since the last call; all text once it is finished or stopped."""
        end = len(self._text)
        if not self._finished and not self.stopped:
            end -= max((_overlap(self._text, s) for s in self._stop), default=0)
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
