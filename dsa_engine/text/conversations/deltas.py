"""The pieces of an assistant's message, as they are read from a stream of text, and the message that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: the number of the call in its message, from 0.
        id: a name for the call, on its first piece only.
        name: the function's name, on the call's first piece only.
        arguments: further text of the arguments. The pieces of a call, joined, are one JSON object; it is unfinished if
            the answer ended, or lost its form, within the call.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class MessageDelta:
    """A piece of a message: a part of the thought, of the content, or of tool calls; the others are None or empty."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


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
