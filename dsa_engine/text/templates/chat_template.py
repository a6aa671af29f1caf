"""The prompt that a chat template makes of a conversation.

A template is an untrusted program in the model folder. It runs in a sandbox (``sandbox.py``) that bounds the length of
its values, here under a time limit, and every failure in it becomes one error that names the template.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dsa_engine.config.checks import shown
from dsa_engine.config.json_text import read_json

TIME_LIMIT = 20.0  # seconds for one conversation; templates take milliseconds

_SANDBOX = ("dsa_engine.text.templates.sandbox", "dsa_engine.text.templates.limits")

_CONTINUED = "\ue000 "  # marks the end of a message; the space shows whether the template strips messages
# How templates read messages: arguments of calls as objects, else as texts; a missing content as None, else as "".
_READS_OBJECTS = re.compile(r"\.items\(|\|\s*items\b|arguments\W{0,4}\|\s*tojson|function\W{0,4}\|\s*tojson")
_ASKS_FOR_NONE = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?none")


class _OutOfTime(BaseException):
    """Not an Exception, so that no handler in between catches it."""


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    folder: str,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
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
        tools: JSON schemas of functions that the model may call.

    Raises:
        ValueError: the folder has no template, or the template fails.
    """
    from dsa_engine.text.templates.sandbox import render_bounded  # imports jinja2, which only conversations need

    given, variables = chat_template is not None, dict(chat_template_kwargs or {})
    if not given and not tokenizer.chat_template:
        raise ValueError(f"{folder} has no chat template; use generate() with a prompt of your own making")
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents"}
    if wrong := sorted(reserved & variables.keys()):
        raise ValueError(f"chat_template_kwargs has {', '.join(wrong)}, which a template's variable cannot be called")
    with _one_error("the chat template that was given" if given else f"the chat template of {folder}"):
        tools = None if tools is None else list(tools)
        source = tokenizer.get_chat_template(chat_template, tools)
        plain = [_as_read(_plain({k: v for k, v in one.items() if v is not None}), source) for one in messages]
        if continue_final_message:
            plain[-1]["content"] = f"{plain[-1].get('content', '')}{_CONTINUED}"
        variables = {
            **tokenizer.special_tokens_map,
            "messages": plain,
            "tools": None if tools is None else [tool_schema(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **_plain(variables),
        }
        text = _in_time(lambda: render_bounded(source, variables))
        return _until_mark(text) if continue_final_message else text


def _plain(value: Any) -> Any:
    """A value of plain Python types: the methods of others are not made for untrusted programs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    plain: Any
    for kind, plain in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        plain = [_plain(one) for one in value]
        return plain if isinstance(value, list) else tuple(plain)
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or PyTorch
        return _plain(value.item())
    return f"<{type(value).__name__}>"


def _as_read(message: dict[str, Any], source: str) -> dict[str, Any]:
    """A message as the template reads it: the arguments of calls as an object or as its JSON, and a missing content as
    None only for a template that asks for that."""
    if "content" not in message:
        message["content"] = None if _ASKS_FOR_NONE.search(source) else ""
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        message["tool_calls"] = [_call_as_read(call, bool(_READS_OBJECTS.search(source))) for call in calls]
    return message


def _call_as_read(call: Any, as_object: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if as_object and isinstance(arguments, str):
        arguments = read_json(arguments)
    elif not as_object and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}} if function and arguments is not None else call


def tool_schema(tool: Any) -> Any:
    """A tool as plain Python types; that of a Python function is made of its types and docstring.

    Raises:
        ValueError: the function has no types, or no docstring.
    """
    if not callable(tool):
        return _plain(tool)
    from transformers.utils import get_json_schema

    try:
        return _plain(get_json_schema(tool))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{shown(tool)} cannot be described as a tool: {reason}") from error


def _until_mark(text: str) -> str:
    """The text before the mark at the end of the last message; its own spaces too, unless the template strips them."""
    before, mark, after = text.rpartition(_CONTINUED.strip())
    if not mark:
        raise ValueError("continue_final_message needs the last message in the text, and the template leaves it out")
    return before if after.startswith(" ") else before.rstrip()


@contextmanager
def _one_error(template: str) -> Iterator[None]:
    try:
        yield
    except _OutOfTime:
        raise ValueError(f"{template} did not end within {TIME_LIMIT:g} seconds; give another one") from None
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"{template} failed: {type(error).__name__}: {reason}") from error


def _in_time(run: Callable[[], Any]) -> Any:
    """Calls ``run``; raises :class:`_OutOfTime` in it at the first line of Python after :data:`TIME_LIMIT`.

    It traces, instead of using a signal or a thread, so that it works in any thread and ends endless loops.
    """
    deadline = time.monotonic() + TIME_LIMIT

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > deadline:
            raise _OutOfTime
        # The sandbox's own checks end by themselves, and are several times as fast without tracing.
        return None if frame.f_globals.get("__name__") in _SANDBOX else trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return run()
    finally:
        sys.settrace(before)
