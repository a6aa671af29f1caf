"""DeepSeek-V3.2's own form of a conversation, for folders that bring no Jinja template.

The form is that of ``encoding/encoding_dsv32.py`` in the released folder. The last message of a user or developer
divides a conversation: only after it are thoughts written, and only there a thinking model's answers begin with one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_engine.config.checks import check, shown
from dsa_engine.text.conversations.reader import THINK, THINK_END
from dsa_engine.text.conversations.released_texts import RESPONSE_FORMAT, TOOLS, released_text

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
TAG = "｜DSML｜"
TOKENS = (BEGIN, END, USER, ASSISTANT, THINK, THINK_END, TAG)

_KWARGS = ("thinking", "enable_thinking", "reasoning_effort", "drop_thinking")


def render_v32(
    messages: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The text of a conversation.

    Args:
        messages: with the roles system, user, developer, assistant and tool. A system or developer message may carry
            ``tools`` and a ``response_format``, the JSON schema of the answer.
        chat_template_kwargs: ``thinking`` (also ``enable_thinking``): whether the answer begins with a thought, False
            by default; ``drop_thinking``: whether a thinking model's prompt leaves out the developer messages before
            the last question, True by default; ``reasoning_effort``, which changes nothing. Thoughts before that
            question are never written.
        others: see :meth:`dsa_engine.text.conversations.ConversationFormat.render`.
    """
    thinking, drops = _modes(dict(chat_template_kwargs or {}))
    messages = list(messages)
    if continue_final_message and messages[-1]["role"] != "assistant":
        raise ValueError(
            f"continue_final_message needs a last message of the assistant, not of {shown(messages[-1]['role'])}"
        )
    if thinking and drops:
        last = _last_question(messages)
        messages = [m for number, m in enumerate(messages) if m["role"] != "developer" or number >= last]
    parts = _Parts(folder, thinking, _last_question(messages))
    for number, message in enumerate(messages):
        parts.add(number, message)
    text = BEGIN + "".join(parts.texts)
    if continue_final_message:
        return text.removesuffix(END)
    return text if add_generation_prompt else text.removesuffix(parts.generation_prompt)


def with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Any] | None, response_format: Any
) -> list[dict[str, Any]]:
    """Messages whose first is a system message with these tools and this response format, besides its own."""
    if not tools and not response_format:
        return messages
    has_system = messages[0]["role"] == "system"
    system: dict[str, Any] = dict(messages[0]) if has_system else {"role": "system", "content": ""}
    system["tools"] = [*(system.get("tools") or ()), *(tools or ())]
    system["response_format"] = response_format or system.get("response_format")
    return [system, *messages[has_system:]]


def _modes(given: dict[str, Any]) -> tuple[bool, bool]:
    if wrong := sorted(given.keys() - set(_KWARGS)):
        raise ValueError(f"chat_template_kwargs of DeepSeek-V3.2 are {', '.join(_KWARGS)}, not {', '.join(wrong)}")
    for name, value in given.items():
        if name != "reasoning_effort":  # the form has no words for one
            check(f"{name} in chat_template_kwargs", value, bool)
    return given.get("thinking", False) or given.get("enable_thinking", False), given.get("drop_thinking", True)


def _last_question(messages: Sequence[Mapping[str, Any]]) -> int:
    """The number of the last message of a user or developer; -1 if there is none."""
    return max((number for number, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1)


class _Parts:
    def __init__(self, folder: Path, thinking: bool, last_question: int):
        self.texts: list[str] = []
        self.generation_prompt = ""  # the end of the text so far, if it begins an answer
        self._folder, self._thinking, self._last_question = folder, thinking, last_question
        self._calls = self._results = 0  # those of the assistant's message whose results may follow

    def add(self, number: int, message: Mapping[str, Any]) -> None:
        role = message["role"]
        self.generation_prompt = ""
        if role == "tool":
            self._add_result(number, message)
            return
        self._calls = self._results = 0
        if role == "system":
            self.texts.append(message.get("content") or "")
            self.texts += [f"\n\n{text}" for text in self._prompts(message)]
        elif role in ("user", "developer"):
            self.texts += [USER, message["content"] if role == "user" else self._developer(message)]
            self._begin_answer(ASSISTANT, number == self._last_question)
        elif role == "assistant":
            self._add_answer(number, message)
        else:
            roles = "system, user, developer, assistant and tool"
            raise ValueError(f"messages of DeepSeek-V3.2 have the roles {roles}, not {shown(role)}")

    def _begin_answer(self, before: str, after_question: bool) -> None:
        self.generation_prompt = before + (THINK if self._thinking and after_question else THINK_END)
        self.texts.append(self.generation_prompt)

    def _developer(self, message: Mapping[str, Any]) -> str:
        if not message.get("content"):
            raise ValueError("a developer message must have a content that is not empty")
        return "\n\n".join(["", *self._prompts(message), f"# The user's message is: {message['content']}"])

    def _prompts(self, message: Mapping[str, Any]) -> list[str]:
        """The words about the tools and the format of the answer that a message carries."""
        prompts = []
        if tools := message.get("tools"):
            prompts.append(
                released_text(
                    self._folder,
                    TOOLS,
                    tool_schemas="\n".join(map(_schema, tools)),
                    dsml_token=TAG,
                    thinking_start_token=THINK,
                    thinking_end_token=THINK_END,
                )
            )
        if schema := message.get("response_format"):
            prompts.append(released_text(self._folder, RESPONSE_FORMAT, schema=_json(schema)))
        return prompts

    def _add_answer(self, number: int, message: Mapping[str, Any]) -> None:
        calls, thought = message.get("tool_calls") or [], _thought(message)
        if self._thinking and number > self._last_question:
            if not calls and not thought:
                raise ValueError(
                    "with thinking, a message of the assistant after the user's last one must have reasoning_content "
                    f"or tool_calls, which messages[{number}] has not"
                )
            self.texts += [thought, THINK_END]
        self.texts.append(message.get("content") or "")
        if calls:
            written = "\n".join(map(_call, calls))
            self.texts.append(f"\n\n<{TAG}function_calls>\n{written}\n</{TAG}function_calls>")
        self.texts.append(END)
        self._calls = len(calls)

    def _add_result(self, number: int, message: Mapping[str, Any]) -> None:
        if self._results == self._calls:
            raise ValueError(
                f"messages[{number}] is the result of a tool, and there is no call for it: before it, the assistant "
                f"made {self._calls} calls, and {self._results} results came"
            )
        self.texts += ["" if self._results else "\n\n<function_results>", f"\n<result>{message['content']}</result>"]
        self._results += 1
        if self._results == self._calls:
            self.texts.append("\n</function_results>")
            self._begin_answer("\n\n", number > self._last_question)


def _thought(message: Mapping[str, Any]) -> str:
    thought = message.get("reasoning_content") or ""
    if not isinstance(thought, str):
        raise ValueError(f"the reasoning_content of a message must be a text, not {shown(thought)}")
    return thought


def _schema(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError(f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, not {shown(tool)}")
    return _json(function)


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError(f"a tool call must be {{'function': {{'name': …, 'arguments': …}}}}, not {shown(call)}")
    given = function["arguments"]
    parameters = "\n".join(
        f'<{TAG}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else _json(value)}</{TAG}parameter>"
        for key, value in (json.loads(given) if isinstance(given, str) else given).items()
    )
    return f'<{TAG}invoke name="{name}">\n{parameters}\n</{TAG}invoke>'


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{shown(value)} cannot be written as JSON: {error}") from None
