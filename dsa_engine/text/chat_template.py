"""The prompt that a chat template makes of a conversation: ``transformers`` renders it, in its sandbox of jinja2."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsa_engine.config.checks import shown

_ROLES = {"system", "developer", "user", "assistant", "tool"}  # "developer" is "system" where it has no words
# How templates read messages: arguments of calls as objects, else as texts; a missing content as None, else as "".
_READS_OBJECTS = re.compile(r"\.items\(|\|\s*items\b|arguments\W{0,4}\|\s*tojson|function\W{0,4}\|\s*tojson")
_ASKS_FOR_NONE = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none")
_READS_TOOLS = re.compile(r"(?<![.\w'\"])tools\b(?!['\"])")  # the variable, not a key of messages


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
        messages: one of the results of :func:`.conversations.messages.conversations`.
        tools: functions that the model may call: JSON schemas, or Python functions with types and a docstring.
        others: see :meth:`dsa_engine.text.conversations.ConversationFormat.render`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(f"{folder} has no chat template; use generate() with a prompt of your own making")
    given = "that was given" if chat_template is not None else f"of {folder}"

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
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"the chat template {given} failed: {type(error).__name__}: {reason}") from error
    if tools and not _READS_TOOLS.search(template) and not _described(tools, messages):
        raise ValueError(
            f"the chat template {given} has no words for tools, so the model would not know them; describe "
            "them in the system message, by their names, or use a chat_template that reads tools"
        )
    for message in messages:
        if (role := message["role"]) not in _ROLES and not _names(template, role):
            roles = "use system, user, assistant or tool"
            raise ValueError(f"the chat template {given} has no words for messages of the role {shown(role)}; {roles}")
    return str(text)


def _described(tools: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a system message names all tools: templates of V3.1 and R1 leave their description to callers."""
    text = "".join(str(m.get("content")) for m in messages if m["role"] == "system")
    schemas = [tool_schema(tool) for tool in tools]
    functions = [one.get("function", one) if isinstance(one, Mapping) else None for one in schemas]
    return all(isinstance(one, Mapping) and str(one.get("name")) in text for one in functions)


def _names(template: str, role: str) -> bool:
    return re.search(f"['\"]{re.escape(role)}['\"]", template) is not None


def _as_read(given: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message as the template reads it: the arguments of calls as an object or as its JSON, and a missing content as
    None only for a template that asks for that."""
    message = {key: value for key, value in given.items() if value is not None}
    if message["role"] == "developer" and not _names(template, "developer"):
        message["role"] = "system"
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
    """A tool's JSON schema; that of a Python function is made of its types and docstring."""
    if not callable(tool):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(f"{tool!r} cannot be described as a tool: {error}") from error
