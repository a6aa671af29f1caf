"""The pieces of an assistant's message, as they are read from a stream of text, and the message that they make."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal["reasoning", "content", "call"]


class MessageDelta(NamedTuple):
    """A piece of a message: more of its thought, of its content, or of one of its tool calls."""

    kind: Kind
    text: str  # of a call: joined, one JSON object, unfinished if the answer ended, or lost its form, within the call
    number: int = 0  # of a call: in the message, from 0
    id: str | None = None  # a name for a call, on its first piece only
    name: str | None = None  # the function's name, on the call's first piece only


class MessageWriter:
    """The pieces of a message that were not yet taken; neighbours of the same kind are one piece."""

    def __init__(self, several_calls: bool) -> None:
        self._several_calls = several_calls
        self._pieces: list[tuple[Kind, int, list[str]]] = []  # kind, index of the call, texts
        self._names: list[str] = []
        self._begun = 0  # calls whose names were taken

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def content(self, text: str) -> None:
        self._add("content", text)

    def begin_call(self, name: str) -> None:
        self._names.append(name)

    def arguments(self, text: str) -> None:
        self._add("call", text)

    @property
    def has_calls(self) -> bool:
        return bool(self._names)

    def take(self) -> list[MessageDelta]:
        pieces, self._pieces = self._pieces, []
        return [self._delta(*piece) for piece in pieces]

    def _add(self, kind: Kind, text: str) -> None:
        call = len(self._names) - 1
        if not text or (kind == "call" and call and not self._several_calls):
            return
        if not self._pieces or self._pieces[-1][:2] != (kind, call):
            self._pieces.append((kind, call, []))
        self._pieces[-1][2].append(text)

    def _delta(self, kind: Kind, call: int, texts: list[str]) -> MessageDelta:
        text = "".join(texts)
        if kind != "call" or call < self._begun:
            return MessageDelta(kind, text, call if kind == "call" else 0)
        self._begun = call + 1
        return MessageDelta(kind, text, call, f"call_{uuid.uuid4().hex[:24]}", self._names[call])


def message_of(deltas: Sequence[MessageDelta]) -> dict[str, Any]:
    """The assistant's message of these pieces, in the form of OpenAI's API, with the thought as ``reasoning_content``.

    Thought and tool calls are left out where there are none; a content that is empty beside tool calls is None.
    """

    def text(kind: Kind, call: int | None = None) -> str:
        return "".join(one.text for one in deltas if one.kind == kind and call in (None, one.number))

    message: dict[str, Any] = {"role": "assistant", "content": text("content")}
    if thought := text("reasoning"):
        message["reasoning_content"] = thought
    if calls := [one for one in deltas if one.name is not None]:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": text("call", one.number)}}
            for one in calls
        ]
    return message
