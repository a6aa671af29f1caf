"""Text that grows token by token and ends at a stop string."""

from __future__ import annotations

from dsa_engine.outputs import Logprob, Logprobs
from dsa_engine.text.tokenizer import Tokenizer

# Maximum number of tokens whose text is held back because they may still become a character.
_MAX_PENDING = 12


class TextStream:
    """Turns a growing list of tokens into text, ends it at a stop string, and releases text once it is final.

    A character may need several tokens, and a stop string may span several; text that could still change is held back.

    Args:
        min_tokens: number of first tokens whose text is not searched for stop strings.
        include_stop: the text ends after the stop string, not before it.
        streams: text is wanted before the end. Without it, and without stop strings, it is made once, at the end.

    Attributes:
        stop_string: the one that the text has reached; None if it has reached none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        streams: bool = True,
    ):
        self._tokenizer = tokenizer
        self._stop = stop
        self._beginnings = tuple(one[:n] for one in stop for n in range(1, len(one)))
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._waits = not (streams or stop)
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text can no longer change
        self._window = 0  # decoding starts here, before the settled tokens, to keep spaces between words
        self._before = ""  # the text of the settled tokens from there on
        self._final: list[str] = []  # text that can no longer change and has not been given
        self._tail = ""  # text after it, with which a stop string may begin
        self.stop_string: str | None = None

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
        if self._waits:
            return
        after = self._decode(self._tokens[self._window :])
        settled = len(self._tokens)
        if after.endswith("\ufffd"):  # an unfinished character
            if settled - self._settled < _MAX_PENDING:
                return
            settled, after = self._whole_characters()
        new = after[len(self._before) :]
        self._window, self._settled = self._settled, settled
        self._before = self._decode(self._tokens[self._window : settled])
        if not self._stop or len(self._tokens) <= self._min_tokens:
            self._final.append(new)
        else:
            self._search(self._tail + new)

    def _search(self, text: str) -> None:
        """Looks for stop strings in a text, and keeps back its end if one may begin there."""
        end = len(text)
        if stops := [(p, s) for s in self._stop if (p := text.find(s)) >= 0]:
            first, self.stop_string = min(stops, key=lambda stop: stop[0])
            end = first + (len(self.stop_string) if self._include_stop else 0)
            text = text[:end]
        elif text.endswith(self._beginnings):
            end -= max(len(one) for one in self._beginnings if text.endswith(one))
        self._final.append(text[:end])
        self._tail = text[end:]

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

    def finish(self) -> None:
        """Ends the stream: no text is held back any longer; an unfinished character at the end is decoded as it is."""
        self._final.append(self._tail)
        if not self.stopped and self._settled < len(self._tokens):
            self._final.append(self._decode(self._tokens[self._window :])[len(self._before) :])
        self._tail, self._settled = "", len(self._tokens)

    def new_text(self) -> str:
        """The text that became final since the last call; all text once it is finished or stopped."""
        text = "".join(self._final)
        self._final.clear()
        return text
