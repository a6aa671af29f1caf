"""The reader of an answer: text in pieces becomes pieces of a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

from dsa_engine.text.conversations.deltas import MessageDelta, MessageWriter
from dsa_engine.text.conversations.source import LostForm, Steps, Tags, TextEnded, TextSource
from dsa_engine.text.conversations.tool_calls import CallForm
from dsa_engine.text.tokenizer import THINKING

THINK, THINK_END = THINKING


class Thought(Enum):
    """Whether an answer begins with a thought."""

    NONE = "no"
    OPEN = "it begins inside a thought"
    POSSIBLE = "a thought may be opened at the beginning"


class MessageReader:
    """Reads one answer. The pieces, joined, do not depend on where the text is cut.

    Without a form ``calls`` they are content; some forms need the schemas of ``tools``. ``end_tokens`` are dropped, and
    so are the calls after the first without ``several_calls``.
    """

    def __init__(
        self,
        thought: Thought = Thought.NONE,
        calls: CallForm | None = None,
        tools: Sequence[Any] = (),
        end_tokens: Sequence[str] = (),
        several_calls: bool = True,
    ):
        self._thought, self._form, self._tools = thought, calls, tools
        self._end_tokens, self._held = Tags(*end_tokens), ""
        self._source, self._message = TextSource(), MessageWriter(several_calls)
        self._in_thought, self._thought_texts = False, list[str]()
        self._steps = self._read()

    def push(self, text: str) -> list[MessageDelta]:
        """What further text of the answer adds to the message, as far as it is certain."""
        text = self._end_tokens.pattern.sub("", self._held + text)
        certain = len(text) - self._end_tokens.begun(text)
        self._held = text[certain:]
        return self._go_on(text[:certain])

    def finish(self, whole: bool = True) -> list[MessageDelta]:
        """What the end of the answer adds: text that could have become a tag, and the answer of a model that wrote
        it into its thought.

        Args:
            whole: the model ended the answer (``finish_reason`` "stop"); otherwise it may have been thinking still.
        """
        self._source.end()
        held, self._held = self._held, ""
        pieces = self._go_on(held)
        if whole and self._in_thought and not self._message.has_calls:
            self._message.content("".join(self._thought_texts).strip())
            pieces += self._message.take()
        return pieces

    def _go_on(self, text: str) -> list[MessageDelta]:
        self._source.push(text)
        next(self._steps, None)
        return self._message.take()

    def _read(self) -> Steps[None]:
        calls = [before + tag for tag in self._form.tags for before in ("\n\n", "\n", "")] if self._form else []
        if self._thought in (Thought.OPEN, Thought.POSSIBLE):
            yield from self._read_thought(self._thought is Thought.OPEN, Tags(THINK_END, *calls))
        tags = Tags(*calls)
        while (tag := (yield from self._source.until(tags, self._message.content))) is not None:
            self._source.mark(tag)
            yield from self._read_calls(self._message.content)

    def _read_thought(self, is_open: bool, stops: Tags) -> Steps[None]:
        """Reads a thought, in which text goes up to the end tag, or to a call; an open one may be opened once more."""
        opened = None
        self._source.mark()
        try:
            yield from self._source.space()
            opened = yield from self._source.follows(THINK)
        except TextEnded:
            pass
        if opened is None:
            (self._think if is_open else self._message.content)(self._source.since_mark())
        self._in_thought = bool(opened or is_open)
        while self._in_thought:
            tag = yield from self._source.until(stops, self._think)
            if tag is None:
                return
            if tag == THINK_END:
                self._in_thought = False
                yield from self._skip(THINK_END)
            else:
                self._source.mark(tag)
                yield from self._read_calls(self._think)
                self._in_thought = not self._message.has_calls

    def _think(self, text: str) -> None:
        self._thought_texts.append(text)
        self._message.reasoning(text)

    def _skip(self, tag: str) -> Steps[None]:
        """Drops an end tag that the model writes once more."""
        with suppress(TextEnded):
            while (yield from self._source.follows(tag, f"\n{tag}", f"\n\n{tag}")):
                pass

    def _read_calls(self, take: Callable[[str], None]) -> Steps[None]:
        """Reads calls after their first tag; ``take`` gets what is none."""
        assert self._form is not None
        try:
            yield from self._form.read(self._source, self._message, self._tools)
            yield from self._skip(self._form.end)
            yield from self._source.space()
        except LostForm:
            (self._message.content if self._message.has_calls else take)(self._source.since_mark())
        except TextEnded:
            if self._message.has_calls:  # the rest is a call that was cut off
                yield from self._source.until(Tags(), lambda _: None)
            else:
                take(self._source.since_mark())
