"""Conversations and chat templates, which are untrusted programs."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.demo import demo_folder
from dsa_engine.text import chat_template
from dsa_engine.text.chat_template import conversations
from dsa_engine.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(demo_cache: Path) -> Tokenizer:
    return Tokenizer(demo_folder())


def test_what_a_conversation_may_look_like() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, "three"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert conversations(HELLO) == [HELLO]
    assert conversations([HELLO, tuple(HELLO)]) == [HELLO, HELLO]
    parsed = conversations([{"role": "user", "content": parts, "name": "n"}, call])
    assert parsed == [[{"role": "user", "content": "one\ntwo\nthree", "name": "n"}, call]]


@pytest.mark.parametrize(
    "messages, error, message",
    [
        ("hello", TypeError, "a conversation is a list of .*, not 'hello'"),
        ([], ValueError, "the conversation is empty"),
        ([[]], ValueError, "the conversation is empty"),
        ([HELLO, []], ValueError, "the conversation is empty"),
        ([{"role": "user"}], TypeError, "a conversation is a list of"),
        ([{"content": "x"}], TypeError, "a conversation is a list of"),
        ([{"role": "user", "content": 5}], TypeError, "a conversation is a list of"),
        ([HELLO[0], "x"], TypeError, "a conversation is a list of"),
        ([["x"]], TypeError, "a conversation is a list of"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            ValueError,
            "a part of a message's content must be {'type': 'text', 'text': …}, as the model reads text only, not "
            "{'type': 'image_url'",
        ),
    ],
)
def test_what_is_no_conversation(messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        conversations(messages)


def test_arguments(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_text(HELLO).endswith("Hello<|Assistant|>")
    assert tokenizer.chat_text(HELLO, add_generation_prompt=False).endswith("Hello")
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    open_end = tokenizer.chat_text(begun, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith("<|Assistant|>I am")
    own = "{{ messages[0]['content'] }} {{ mood }}{% if tools %} {{ tools[0]['name'] }}{% endif %}"
    text = tokenizer.chat_text(HELLO, chat_template=own, chat_template_kwargs={"mood": "glad"}, tools=[{"name": "f"}])
    assert text == "Hello glad f"
    with pytest.raises(ValueError, match="continue_final_message goes on with the last message; give add_generation"):
        tokenizer.chat_text(HELLO, continue_final_message=True)
    with pytest.raises(ValueError, match="chat_template_kwargs has tokenize, which a template's variable cannot be"):
        tokenizer.chat_text(HELLO, chat_template_kwargs={"tokenize": True})


NESTED = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].content.missing.deep }}", "UndefinedError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'x' * (2 * 1024 * 1024 * 1024 * 1024 * 1024) }}", "MemoryError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", r"line 1 has the operator '\*\*'"),
        ("{{ range(10000000) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_is_one_error(tokenizer: Tokenizer, template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^the chat template that was given failed: .*{reason}[^\n]*$"):
        tokenizer.chat_text(HELLO, chat_template=template)


@pytest.mark.parametrize("traced", [False, True])
def test_a_template_without_an_end(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, traced: bool) -> None:
    """Ended in whatever thread it runs; a debugger's trace function stays."""
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.2)
    monkeypatch.setattr(tokenizer.hf, "chat_template", NESTED)
    errors: list[BaseException] = []
    traces: list[Any] = []

    def own(frame: Any, event: str, arg: Any) -> None:
        return None

    def run() -> None:
        before = sys.gettrace()
        if traced:
            sys.settrace(own)
        try:
            tokenizer.chat(HELLO)
        except ValueError as error:
            errors.append(error)
        finally:
            traces.append(sys.gettrace() is (own if traced else before))
            sys.settrace(before)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert traces == [True, True]
    assert [str(error) for error in errors] == [
        f"the chat template of {demo_folder()} did not end within 0.2 seconds; give another one"
    ] * 2
