"""Conversations, and the checkpoint's chat template, which makes a prompt of one.

A template is an untrusted program in the model folder. It runs in a sandbox (``template_sandbox.py``) that bounds the
length of its values, here under a time limit, and every failure in it becomes one error that names the template.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dsa_engine.config.checks import check_text, shown

TIME_LIMIT = 20.0  # seconds for one conversation; templates take milliseconds

_SANDBOX = ("dsa_engine.text.template_sandbox", "dsa_engine.text.template_limits")

Message = Mapping[str, Any]
_CONTINUED = "\ue000 "  # marks the end of a message; the space shows whether the template strips messages
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which callers pass a message's reasoning
_FORM = "a conversation is a list of {'role': …, 'content': …}"


class _OutOfTime(BaseException):
    """Not an Exception, so that no handler in between catches it."""


def conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or several, as a list of conversations in which the content of each message is a text.

    Args:
        messages: ``[{"role": "user", "content": "…"}, …]`` or a list of such lists. A content may be a list of
            parts ``{"type": "text", "text": "…"}``, whose texts become lines; beside ``tool_calls`` it may be missing.

    Raises:
        TypeError, ValueError: not a conversation, or parts that are not text.
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
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    if isinstance(content, (list, tuple)):
        content = "\n".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise TypeError(f"{_FORM}, not {shown(conversation)}")
    return {**message, "content": content}


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(
        "a part of a message's content must be {'type': 'text', 'text': …}, as the model reads text only, not "
        f"{shown(part)}"
    )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
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
        messages: one of the results of :func:`conversations`.
        folder: where the tokenizer comes from, for errors.
        chat_template: a template to use instead of the folder's.
        chat_template_kwargs: further variables of the template.
        add_generation_prompt: end the text where the assistant's answer begins.
        continue_final_message: leave the last message open, to be continued.
        tools: JSON schemas of functions that the model may call.

    Raises:
        ValueError: the folder has no template, or the template fails.
    """
    from dsa_engine.text.template_sandbox import render_bounded  # imports jinja2, which only conversations need

    given, variables = chat_template is not None, dict(chat_template_kwargs or {})
    if not given and not tokenizer.chat_template:
        raise ValueError(f"{folder} has no chat template; use generate() with a prompt of your own making")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message goes on with the last message; give add_generation_prompt=False with it"
        )
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"documents"}
    if wrong := sorted(reserved & variables.keys()):
        raise ValueError(f"chat_template_kwargs has {', '.join(wrong)}, which a template's variable cannot be called")
    for message in messages:
        if isinstance(message.get("content"), str):
            check_text("the content of a message", message["content"])
    with _one_error("the chat template that was given" if given else f"the chat template of {folder}"):
        tools = None if tools is None else list(tools)
        source = tokenizer.get_chat_template(chat_template, tools)
        plain = [_with_reasoning(_plain({k: v for k, v in one.items() if v is not None})) for one in messages]
        if continue_final_message:
            plain[-1]["content"] = f"{plain[-1].get('content', '')}{_CONTINUED}"
        variables = {
            **tokenizer.special_tokens_map,
            "messages": plain,
            "tools": None if tools is None else [_schema(tool) for tool in tools],
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


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the name that templates read, whichever of the usual names it came under."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _schema(tool: Any) -> Any:
    if not callable(tool):
        return _plain(tool)
    from transformers.utils import get_json_schema

    return _plain(get_json_schema(tool))


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
