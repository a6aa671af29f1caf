"""Conversations and chat templates, which are untrusted programs."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from dsa_engine.demo import demo_folder
from dsa_engine.text.conversations import ConversationFormat
from dsa_engine.text.conversations.messages import conversations
from dsa_engine.text.templates import chat_template, limits
from dsa_engine.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def form(demo_cache: Path) -> ConversationFormat:
    return ConversationFormat(Tokenizer(demo_folder()))


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


def test_arguments(form: ConversationFormat) -> None:
    assert form.render(HELLO).endswith("Hello<|Assistant|>")
    assert form.render(HELLO, add_generation_prompt=False).endswith("Hello")
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    open_end = form.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert open_end.endswith("<|Assistant|>I am")
    own = "{{ messages[0]['content'] }} {{ mood }}{% if tools %} {{ tools[0]['name'] }}{% endif %}"
    text = form.render(HELLO, chat_template=own, chat_template_kwargs={"mood": "glad"}, tools=[{"name": "f"}])
    assert text == "Hello glad f"
    with pytest.raises(ValueError, match="continue_final_message goes on with the last message; give add_generation"):
        form.render(HELLO, continue_final_message=True)
    with pytest.raises(ValueError, match="chat_template_kwargs has tokenize, which a template's variable cannot be"):
        form.render(HELLO, chat_template_kwargs={"tokenize": True})


def test_half_a_surrogate_pair(form: ConversationFormat) -> None:
    with pytest.raises(ValueError, match=r"^the content of a message has half a surrogate pair, .* \('\\udcff'\); "):
        form.render([*HELLO, {"role": "user", "content": "a\udcff"}])


NESTED = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages[0].content.missing.deep }}", "UndefinedError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ namespace(_x=1)._x }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "SecurityError"),
        ("{{ range(10000000) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_is_one_error(form: ConversationFormat, template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^the chat template that was given failed: .*{reason}[^\n]*$"):
        form.render(HELLO, chat_template=template)


LONG = "{% set v = 'x' * 90000 %}"
GROWING = "{% set ns = namespace(v=['x' * 100]) %}{% for i in range(60) %}{% set ns.v = {} %}{% endfor %}"
NESTED_LISTS = GROWING.replace("{}", "[ns.v, ns.v]")


@pytest.mark.parametrize(
    "template",
    [
        "{% set v = 'xy' %}" + "{% set v = v + v %}" * 99,
        GROWING.replace("{}", "ns.v + ns.v"),
        GROWING.replace("{}", "ns.v ~ ns.v"),
        GROWING.replace("{}", "9 ** (9 ** 9) * i"),
        NESTED_LISTS + "{{ ns.v }}",
        NESTED_LISTS + "{{ ns.v ~ '' }}",
        NESTED_LISTS + "{{ ns.v | tojson }}",
        NESTED_LISTS + "{{ ns.v | string }}",
        NESTED_LISTS + "{{ ns.v | replace('a', 'b') }}",
        NESTED_LISTS + "{{ 'a' | replace(ns.v, 'b') }}",
        NESTED_LISTS + "{{ '%s' % ns.v }}",
        NESTED_LISTS + "{{ '{}'.format(ns.v) }}",
        NESTED_LISTS + "{{ '{x}' | format(x=ns.v) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{{ 9.5 | round(1000000000, 'ceil') }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x' | center(width=10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' | format(10000000000, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10000000000) }}",
        "{{ [1] | batch(10000000000, 'x') | list }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        "{{ ('\\t' * 90000).expandtabs(1000000) }}",
        LONG + "{{ v | replace('x', v) }}",
        LONG + "{{ v.replace('', v) }}",
        LONG + "{{ 'abc' | join(v) }}",
        LONG + "{{ v.join('abc') }}",
        LONG + "{{ 'a\\nb\\nc' | indent(v) }}",
        LONG + "{{ 'aaa'.translate({97: v}) }}",
        LONG + "{{ '%s%s' % (v, v) }}",
        LONG + "{{ '{0}{0}'.format(v) }}",
        LONG + "{{ range(99) | map('replace', '1', v) | join }}",
        LONG + "{% for i in range(99) %}{{ v }}{% endfor %}",
        LONG + "{% set w %}{% for i in range(99) %}{{ v }}{% endfor %}{% endset %}",
        LONG + "{% macro m() %}{{ v }}{{ v }}{% endmacro %}{{ m() }}",
        "{% set r = range(100000) | list %}{{ ([r] * 100000) | sum(start=[]) }}",
    ],
)
def test_a_template_that_would_take_all_memory(
    form: ConversationFormat, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(limits, "VALUE", 100_000)
    with pytest.raises(ValueError, match=r"^the chat template that was given failed: TooLong: it (makes|formats) "):
        form.render(HELLO, chat_template=template)


def test_values_of_a_template_are_limited_together(form: ConversationFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VALUE", 100_000)
    many = "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [v ~ i] %}{% endfor %}"
    with pytest.raises(ValueError, match="it makes values of more than 12,800,000 characters in all"):
        form.render(HELLO, chat_template=many, chat_template_kwargs={"v": "x" * 5_000})
    long = [{"role": "user", "content": "x" * 90_000}]
    assert len(form.render(long, chat_template="{{ messages[0].content * 9 }}")) == 810_000


TEMPLATE = """{%- if tools %}{{ '%-8s|' | format('tools') }}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(system='', n=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = ns.system ~ message.content %}{% continue %}{% endif %}
    {%- if loop.index0 > 8 %}{% break %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- '<' + message['role'] + '>' + (message.content or '')|trim + '\n' * 2 }}
    {%- if message.reasoning_content %}{{ '<think>' ~ message.reasoning_content ~ '</think>' }}{% endif %}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{{ call.id is defined }}{% endfor %}
    {%- if message.role == 'assistant' %}{% generation %}{{ (message.content or '')[:1].upper() }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{{- messages[1:] | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}
{{- {'a': ns.n, 'ä': none, 'x': mood} }}{{ messages | length > 2 }}{{ eos_token }}
{{- ('%s' % ns.system).replace('S', 'T') }}
{%- if add_generation_prompt %}{{ bos_token }}<assistant>{% endif %}"""


@pytest.mark.parametrize("how", [{}, {"tools": [{"name": "f", "description": "ä<"}]}, {"add_generation_prompt": False}])
@pytest.mark.parametrize("last", ["", " and spaces ", "x"])
def test_templates_give_what_transformers_gives(form: ConversationFormat, how: dict[str, Any], last: str) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "S"},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "content": "I am", "reasoning": "so"},
        {"role": "user", "content": f"And then?{last}", "time": numpy.int64(5)},
    ]
    how = {"add_generation_prompt": True} | how
    for template in (TEMPLATE, form.tokenizer.hf.chat_template):
        for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
            given = [one for one in conversation if template == TEMPLATE or one.get("content")]
            text = form.render(given, chat_template=template, chat_template_kwargs={"mood": "glad"}, **how | more)
            wanted = form.tokenizer.hf.apply_chat_template(
                given, chat_template=template, tokenize=False, mood="glad", **how | more
            )
            assert text == wanted


@pytest.mark.parametrize("traced", [False, True])
def test_a_template_without_an_end(form: ConversationFormat, monkeypatch: pytest.MonkeyPatch, traced: bool) -> None:
    """Ended in whatever thread it runs; a debugger's trace function stays."""
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.2)
    monkeypatch.setattr(form.tokenizer.hf, "chat_template", NESTED)
    errors: list[BaseException] = []
    unchanged: list[Any] = []

    def own(frame: Any, event: str, arg: Any) -> None:
        return None

    def run() -> None:
        before = sys.gettrace()
        if traced:
            sys.settrace(own)
        try:
            form.render(HELLO)
        except ValueError as error:
            errors.append(error)
        finally:
            unchanged.append(sys.gettrace() is (own if traced else before))
            sys.settrace(before)

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert unchanged == [True, True]
    assert [str(error) for error in errors] == [
        f"the chat template of {demo_folder()} did not end within 0.2 seconds; give another one"
    ] * 2
