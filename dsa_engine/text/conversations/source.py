"""The text of an answer as it comes, and what a reader of tags asks of it.

Readers are generators. They ask for the text up to a tag, or for one of several tags, and yield where they need more
text. Each character is looked at a bounded number of times, wherever the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where it needs more text, and returns a T

LONGEST_NAME = 1024  # characters of the name of a function or of a parameter

_SPACE = re.compile(r"\s*")


class LostForm(Exception):
    """The text is not in the form of a tool call."""


class TextEnded(Exception):
    """The text ended where it could have gone on in the right form."""


class Tags:
    """Texts to look for; none contains another, or the beginning of another, after its first character."""

    def __init__(self, *texts: str):
        self.texts = texts
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) if texts else "(?!)")
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._first = {text[0] for text in texts}
        self.longest = max(map(len, texts), default=1)

    def begun(self, text: str, start: int = 0) -> int:
        """How many characters at the end of ``text`` may be the beginning of a tag."""
        longest = min(self.longest - 1, len(text) - start)
        if longest <= 0 or self._first.isdisjoint(text[-longest:]):  # most pieces of a stream, so it is asked first
            return 0
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)


class TextSource:
    """Text that one side pushes and the other reads.

    What :meth:`expect` and :meth:`name` consume is remembered since the last :meth:`mark`, as it is content if it turns
    out to be no tool call.
    """

    def __init__(self) -> None:
        self._text, self._at, self._ended = "", 0, False
        self._consumed: list[str] = []

    def push(self, text: str) -> None:
        """Adds text at the end."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Says that no text follows."""
        self._ended = True

    def mark(self, before: str = "") -> None:
        """Forgets what was consumed, but for the text ``before``."""
        self._consumed = [before]

    def since_mark(self) -> str:
        """The text that was consumed since :meth:`mark`."""
        return "".join(self._consumed)

    def until(self, tags: Tags, take: Callable[[str], None]) -> Steps[str | None]:
        """Gives ``take`` the text before the first tag, in pieces; returns that tag, or None at the end of the text."""
        while True:
            if match := tags.pattern.search(self._text, self._at):
                take(self._text[self._at : match.start()])
                self._at = match.end()
                return match[0]
            certain = len(self._text) - (0 if self._ended else tags.begun(self._text, self._at))
            take(self._text[self._at : certain])
            self._at = certain
            if self._ended:
                return None
            yield

    def scan(self, ends_at: Callable[[str, int], int], take: Callable[[str], None]) -> Steps[None]:
        """Gives ``take`` text up to the index that ``ends_at(text, start)`` returns, again and again while that is the
        end of the text; raises :class:`TextEnded` if no more follows."""
        while (end := ends_at(self._text, self._at)) == len(self._text):
            take(self._text[self._at :])
            self._at = end
            if self._ended:
                raise TextEnded
            yield
        take(self._text[self._at : end])
        self._at = end

    def space(self) -> Steps[None]:
        """Consumes white space."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._consume(match.end() if match else self._at)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def follows(self, *options: str) -> Steps[str | None]:
        """The option with which the text goes on, which is consumed; None if it goes on otherwise. Raises
        :class:`TextEnded` if it ended in the beginning of an option."""
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    self._consume(self._at + len(option))
                    return option
            rest = self._text[self._at : self._at + max(map(len, options))]
            if not any(option.startswith(rest) for option in options):
                return None
            if self._ended:
                raise TextEnded
            yield

    def expect(self, *options: str) -> Steps[str]:
        """The option with which the text goes on after white space; :class:`LostForm` if it goes on otherwise."""
        yield from self.space()
        option = yield from self.follows(*options)
        if option is None:
            raise LostForm
        return option

    def name(self, tags: Tags) -> Steps[tuple[str, str]]:
        """A short text before the first of the tags, and that tag; :class:`LostForm` if it is empty or too long."""
        longest = LONGEST_NAME + tags.longest
        while True:
            if match := tags.pattern.search(self._text, self._at, self._at + longest):
                text = self._text[self._at : match.start()]
                if not text.strip():
                    raise LostForm
                self._consume(match.end())
                return text, match[0]
            if len(self._text) - self._at >= longest:
                raise LostForm
            if self._ended:
                raise TextEnded
            yield

    def _consume(self, end: int) -> None:
        if end > self._at:
            self._consumed.append(self._text[self._at : end])
            self._at = end
