"""The prompt that a chat template makes of a conversation: ``transformers`` renders it, in its sandbox of jinja2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# How templates read messages: arguments of calls as objects, else as texts; a missing content as None, else as "".
_READS_OBJECTS = re.compile(r"\.items\(|\|\s*items\b|arguments\W{0,4}\|\s*tojson|function\W{0,4}\|\s*tojson")
_ASKS_FOR_NONE = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none")


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    folder: str,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
) -> str:
    """The text of a conversation.

    Args:
        tokenizer: a tokenizer of ``transformers``.
        messages: one of the results of :func:`dsa_engine.text.conversations.messages.conversations`.
        folder: where the tokenizer comes from, for errors.
        chat_template: a template to use instead of the folder's.
        chat_template_kwargs: further variables of the template.
        add_generation_prompt: end the text where the assistant's answer begins.
        continue_final_message: leave the last message open, to be continued.
        tools: functions that the model may call: JSON schemas, or Python functions with types and a docstring.

    Raises:
        ValueError: the folder has no template, or the template fails.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(f"{folder} has no chat template; use generate() with a prompt of your own making")
    try:
        template = tokenizer.get_chat_template(chat_template, tools)
        # Not apply_chat_template: it drops contents that are None, for which the templates of DeepSeek-V3 ask.
        (text,), _ = render_jinja_template(
            conversations=[[_as_read(one, template) for one in messages]],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **tokenizer.special_tokens_map | dict(chat_template_kwargs or {}),
        )
    except Exception as error:
        given = "that was given" if chat_template is not None else f"of {folder}"
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"the chat template {given} failed: {type(error).__name__}: {reason}") from error
    return str(text)


def _as_read(given: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message as the template reads it: the arguments of calls as an object or as its JSON, and a missing content as
    None only for a template that asks for that."""
    message = {key: value for key, value in given.items() if value is not None}
    message.setdefault("content", None if _ASKS_FOR_NONE.search(template) else "")
    if isinstance(calls := message.get("tool_calls"), (list, tuple)):
        message["tool_calls"] = [_call_as_read(call, bool(_READS_OBJECTS.search(template))) for call in calls]
    return message


def _call_as_read(call: Any, as_object: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if as_object and isinstance(arguments, str):
        arguments = json.loads(arguments)
    elif not as_object and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}} if function and arguments is not None else call


def tool_schema(tool: Any) -> Any:
    """A tool's JSON schema; that of a Python function is made of its types and docstring.

    Raises:
        ValueError: the function has no types, or no docstring.
    """
    if not callable(tool):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(f"{tool!r} cannot be described as a tool: {error}") from error
