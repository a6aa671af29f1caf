"""Prompts in DeepSeek-V3.2's own form, as released, and the words that stand in its Python file."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from conversation_cases import (
    BOTH,
    CITY,
    CONVERSATIONS,
    FORM,
    TIME,
    USER,
    WEATHER,
    Message,
    calls,
    says,
    write_folder,
    write_v32_folder,
)
from dsa_engine.text.conversations import ConversationFormat, conversation_format
from dsa_engine.text.conversations.released_texts import FILE


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ConversationFormat:
    return conversation_format(write_v32_folder(tmp_path_factory.mktemp("v32")), "deepseek_v32")


MODES: list[dict[str, Any]] = [{}, {"thinking": True}, {"thinking": True, "drop_thinking": False}]


def released(messages: list[Message], thinking: bool = False, drop_thinking: bool = True) -> str:
    """What shared/reference/conversations.md says, row by row; results are written with the calls they belong to."""

    def is_asked(i: int) -> bool:
        return messages[i]["role"] in ("user", "developer")

    if thinking and drop_thinking:
        later = [any(map(is_asked, range(i + 1, len(messages)))) for i in range(len(messages))]
        messages = [m for m, old in zip(messages, later, strict=True) if not (old and m["role"] == "developer")]

    def mode(i: int) -> str:
        return "<think>" if thinking and not any(map(is_asked, range(i + 1, len(messages)))) else "</think>"

    def prompts(message: Message) -> list[str]:
        words = []
        if "tools" in message:
            lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in message["tools"])
            words.append(f"## Functions {{of}} <｜DSML｜function_calls> <think>…</think>\n{lines}\n")
        if "response_format" in message:
            words.append("## Form\n\n" + json.dumps(message["response_format"], ensure_ascii=False))
        return words

    text, i = "<｜begin▁of▁sentence｜>", 0
    while i < len(messages):
        message = messages[i]
        content = message["content"] or ""
        match message["role"]:
            case "system":
                text += "\n\n".join([content, *prompts(message)])
            case "user":
                text += f"<｜User｜>{content}<｜Assistant｜>{mode(i)}"
            case "developer":
                parts = ["", *prompts(message), f"# The user's message is: {content}"]
                text += "<｜User｜" + ">" + "\n\n".join(parts) + f"<｜Assistant｜>{mode(i)}"
            case "assistant":
                if mode(i) == "<think>":
                    text += message.get("reasoning_content", "") + "</think>"
                text += content + "".join(block(message.get("tool_calls", []))) + "<｜end▁of▁sentence｜>"
                results = list(itertools.takewhile(lambda m: m["role"] == "tool", messages[i + 1 :]))
                i += len(results)
                if results:
                    text += "\n\n<function_results>" + "".join(f"\n<result>{m['content']}</result>" for m in results)
                if results and len(results) == len(message["tool_calls"]):
                    text += f"\n</function_results>\n\n{mode(i)}"
        i += 1
    return text


def block(tool_calls: list[Message]) -> list[str]:
    if not tool_calls:
        return []
    lines = ["\n", "<｜DSML｜function_calls>"]
    for call in tool_calls:
        lines.append(f'<｜DSML｜invoke name="{call["function"]["name"]}">')
        arguments = json.loads(call["function"]["arguments"])
        lines += [""] if not arguments else []
        for key, value in arguments.items():
            text, word = (value, "true") if isinstance(value, str) else (json.dumps(value, ensure_ascii=False), "false")
            lines.append(f'<｜DSML｜parameter name="{key}" string="{word}">{text}</｜DSML｜parameter>')
        lines.append("</｜DSML｜invoke>")
    return ["\n".join([*lines, "</｜DSML｜function_calls>"])]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_as_released(form: ConversationFormat, name: str, mode: dict[str, Any]) -> None:
    """Each conversation in each mode, character by character; the tokenizer has the special tokens as tokens."""
    expected = released(CONVERSATIONS[name], **mode)
    assert form.render(CONVERSATIONS[name], chat_template_kwargs=mode) == expected
    ids = form.token_ids(CONVERSATIONS[name], chat_template_kwargs=mode)
    assert form.tokenizer.decode(ids, skip_special_tokens=False) == expected and ids[0] == 0


def long_conversation(rng: random.Random) -> list[Message]:
    """Several turns of any kind, in an order that occurs."""
    tools, shape = [None, [WEATHER], [WEATHER, TIME]], [None, FORM]

    def word() -> str:
        return rng.choice(["", "Hello", "ä\n\n", "{x} <b>", 'a "b"', "12°"])

    def with_prompts(message: Message) -> Message:
        given = {"tools": rng.choice(tools), "response_format": rng.choice(shape)}
        return message | {name: value for name, value in given.items() if value}

    made = [with_prompts(says("system", word()))] if rng.random() < 0.6 else []
    for _ in range(rng.randint(1, 5)):
        asks_as_user = rng.random() < 0.8
        made.append(says("user", word()) if asks_as_user else with_prompts(says("developer", word() or "D")))
        for _ in range(rng.randint(0, 3)):
            call = rng.choice([CITY, BOTH])
            made.append(says("assistant", word(), rng.choice(["t", "a\nthought"]), **call))
            made += [says("tool", word()) for _ in call["tool_calls"]]
        if rng.random() < 0.8:
            made.append(says("assistant", word(), rng.choice(["t", "u"])))
    return made


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_long_conversations(form: ConversationFormat, mode: dict[str, Any]) -> None:
    for seed in range(100):
        messages = long_conversation(random.Random(seed))
        assert form.render(messages, chat_template_kwargs=mode) == released(messages, **mode), seed


def test_prompts_written_out(form: ConversationFormat) -> None:
    think = {"chat_template_kwargs": {"thinking": True}}
    old = [USER, says("assistant", "Hello! I am.", "thinking..."), says("user", "1+1=?")]
    assert form.render(old, **think) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜></think>Hello! I am.<｜end▁of▁sentence｜>"
        "<｜User｜>1+1=?<｜Assistant｜><think>"
    )
    called = [says("user", "q"), says("assistant", "", "t", **calls(("f", {"a": "x", "b": 2}))), says("tool", "r")]
    assert form.render(called, **think) == (
        "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>t</think>\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>r</result>\n</function_results>"
        "\n\n<think>"
    )


def test_arguments(form: ConversationFormat) -> None:
    """Tools and a format beside the messages stand in the first system message; ends are open or not."""
    whole = form.render([says("system", "S", tools=[TIME, WEATHER], response_format=FORM), USER])
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM}}
    system = says("system", "S", tools=[TIME])
    assert form.render([system, USER], tools=[WEATHER], response_format=schema) == whole
    assert form.render([USER], tools=[TIME]) == form.render([says("system", "", tools=[TIME]), USER])
    assert form.render([USER], tools=[TIME], tool_choice="none", response_format={"type": "text"}) == form.render(
        [USER]
    )
    assert '{"type": "object"}' in form.render([USER], response_format={"type": "json_object"})
    assert form.render([USER], add_generation_prompt=False) == "<｜begin▁of▁sentence｜><｜User｜>Hello"
    results = CONVERSATIONS["two results"]
    assert form.render(results, add_generation_prompt=False).endswith("</function_results>")
    begun = {"add_generation_prompt": False, "continue_final_message": True}
    assert form.render([USER, says("assistant", "I am")], **begun).endswith("<｜Assistant｜></think>I am")
    assert form.render([USER], chat_template="{{ messages[0].content }}") == "Hello"
    assert form.render([USER], chat_template_kwargs={"enable_thinking": True}).endswith("<think>")
    thoughts = [
        form.render([USER, {"role": "assistant", "content": "x", name: "t"}], chat_template_kwargs={"thinking": True})
        for name in ("reasoning_content", "reasoning", "thinking")
    ]
    assert len(set(thoughts)) == 1 and "<think>t</think>x" in thoughts[0]


def add(a: int) -> int:
    """Adds.

    Args:
        a: a number
    """
    return a


def test_python_functions_are_tools(form: ConversationFormat) -> None:
    assert '{"name": "add", "description": "Adds."' in form.render([USER], tools=[add])
    with pytest.raises(ValueError, match="cannot be described as a tool: "):
        form.render([USER], tools=[lambda a: a])


CALLED = says("assistant", "x", **CITY)
THINKING = {"chat_template_kwargs": {"thinking": True}}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def answer_of(arguments: Any) -> Message:
    return {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    "messages, options, message",
    [
        ([says("developer", "")], {}, "developer message must have a content"),
        ([USER, says("assistant", "x")], THINKING, r"reasoning_content or tool_calls.*messages\[1\]"),
        ([USER, says("tool", "x")], {}, r"messages\[1\] is the result of a tool"),
        ([USER, CALLED, says("tool", "x"), says("tool", "y")], {}, "1 calls, and 1 results"),
        ([says("judge", "x")], {}, "'judge'"),
        ([USER, answer_of({"a": "\ud800"})], {}, "surrogate"),
        ([USER, {**CALLED, "tool_calls": ["f"]}], {}, "a tool call must be .*'f'"),
        ([USER], {"tools": [{"name": "f"}]}, "a tool must be .*{'name': 'f'}"),
        ([USER], {"response_format": {"a": {1, 2}}}, "cannot be written as JSON"),
        ([USER], {"chat_template_kwargs": {"thinkng": True}}, "drop_thinking, not thinkng"),
        ([USER], CONTINUED, "not of 'user'"),
    ],
)
def test_what_the_form_refuses(form: ConversationFormat, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form.render(messages, **options)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no .*encoding_dsv32.py"),
        ("def f(:", "is not as released"),
        (b"\xff\x00", "is not as released"),
        ("TOOLS_SYSTEM_TEMPLATE = 5", "no text TOOLS_SYSTEM_TEMPLATE"),
        ("TOOLS_SYSTEM_TEMPLATE = open('x').read()", "is not as released"),
        ("def f():\n    TOOLS_SYSTEM_TEMPLATE = '{tool_schemas}'", "no text TOOLS_SYSTEM_TEMPLATE"),
        ("TOOLS_SYSTEM_TEMPLATE = '{tool_schemas}{x}'", "is not as released .*'x'"),
    ],
)
def test_another_file_than_the_released_one(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    """Conversations work without it; tools are refused in words."""
    write_folder(tmp_path)
    if content is not None:
        (tmp_path / FILE).parent.mkdir()
        (tmp_path / FILE).write_bytes(content.encode() if isinstance(content, str) else content)
    form = conversation_format(tmp_path, "deepseek_v32")
    assert form.own_form and form.render([USER]) == released([USER])
    with pytest.raises(ValueError, match=f"(?s){message}"):
        form.render([USER], tools=[TIME])
