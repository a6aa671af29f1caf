"""The conversations that callers give: lists of messages, checked, with contents that are texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsa_engine.config.checks import shown

Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which callers pass a message's reasoning
# The field with the text of a part, by its type: in chats, in responses, and of an answer that was none.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_FORM = "a conversation is a list of {'role': …, 'content': …}"


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or several, as a list of conversations in which the content of each message is a text.

    A thought comes under the names that templates read, whichever of the usual ones it had.

    Args:
        messages: ``[{"role": "user", "content": "…"}, …]`` or a list of such lists. A content may be a list of
            parts ``{"type": "text", "text": "…"}``, whose texts become lines; beside ``tool_calls``,
            ``tools`` and a thought it may be missing.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"{_FORM}, not {shown(messages)}")
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    several = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in several:
        if not isinstance(conversation, (list, tuple)):
            raise TypeError(f"{_FORM}, not {shown(conversation)}")
        if not conversation:
            raise ValueError("the conversation is empty; give at least one message")
    return [[_message(message, conversation) for message in conversation] for conversation in several]


def _message(message: Any, conversation: Sequence[Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"{_FORM}, not {shown(conversation)}")
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning} | dict(message) | {"reasoning_content": reasoning}
    if isinstance(calls := message.get("tool_calls"), (list, tuple)):
        message = {**message, "tool_calls": [_call(call) for call in calls]}
    content = message.get("content")
    if content is None and any(message.get(name) for name in ("tool_calls", "tools", "reasoning_content")):
        return dict(message)
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part(part) for part in content)
    if content is None and message["role"] in ("assistant", "tool"):  # of a turn that broke off
        content = ""
    if not isinstance(content, str):
        raise TypeError(f"{_FORM}, not {shown(conversation)}")
    return {**message, "content": content}


def _call(call: Any) -> Any:
    """A call whose arguments are an object or its JSON. Clients send back what they got, also a call that was cut off:
    what is no object becomes the argument ``arguments``, so that the conversation goes on."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    arguments = {} if given is None or given == "" else given
    if not isinstance(arguments, str):
        arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    elif (read := arguments_of(arguments)) == {"arguments": arguments}:
        arguments = read
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call, of their JSON; what is no JSON object is the argument ``arguments``."""
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": text}


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    name = _TEXTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    if name and isinstance(part.get(name), str):
        return str(part[name])
    raise ValueError(
        "a part of a message's content must be {'type': 'text', 'text': …}, as the model reads text only, not "
        f"{shown(part)}"
    )
