"""The pieces of an assistant's message, as they are read from a stream of text."""

from __future__ import annotations

from dataclasses import dataclass, field


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
