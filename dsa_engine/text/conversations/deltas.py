"""The pieces of an assistant's message, as they are read from a stream of text, and the message that they make."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call."""

    index: int  # the number of the call in its message, from 0
    id: str | None = None  # a name for the call, on its first piece only
    name: str | None = None  # the function's name, on the call's first piece only
    # Further text. The pieces of a call, joined, are one JSON object; it is unfinished if the answer ended, or lost its
    # form, within the call.
    arguments: str = ""


@dataclass(frozen=True)
class MessageDelta:
    """A piece of a message: a part of the thought, of the content, or of tool calls; the others are None or empty."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class MessageWriter:
    """The pieces of a message that were not yet taken; neighbours of the same kind are one piece."""

    def __init__(self, several_calls: bool) -> None:
        self._several_calls = several_calls
        self._pieces: list[tuple[str, int, list[str]]] = []  # kind, index of the call, texts
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

    def _add(self, kind: str, text: str) -> None:
        call = len(self._names) - 1
        if not text or (kind == "call" and call and not self._several_calls):
            return
        if not self._pieces or self._pieces[-1][:2] != (kind, call):
            self._pieces.append((kind, call, []))
        self._pieces[-1][2].append(text)

    def _delta(self, kind: str, call: int, texts: list[str]) -> MessageDelta:
        text = "".join(texts)
        if kind == "reasoning":
            return MessageDelta(reasoning=text)
        if kind == "content":
            return MessageDelta(content=text)
        if call < self._begun:
            return MessageDelta(tool_calls=[ToolCallDelta(call, arguments=text)])
        self._begun = call + 1
        return MessageDelta(tool_calls=[ToolCallDelta(call, f"call_{uuid.uuid4().hex[:24]}", self._names[call], text)])


def message_of(deltas: Iterable[MessageDelta]) -> dict[str, Any]:
    """The assistant's message of these pieces, in the form of OpenAI's API, with the thought as ``reasoning_content``.

    Thought and tool calls are left out where there are none; a content that is empty beside tool calls is None.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        reasoning.append(delta.reasoning or "")
        content.append(delta.content or "")
        for piece in delta.tool_calls:
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.name, "arguments": []})
            call["arguments"].append(piece.arguments)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if thought := "".join(reasoning):
        message["reasoning_content"] = thought
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
            }
            for call in calls.values()
        ]
    return message
