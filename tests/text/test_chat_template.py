"""Conversations, and the prompts that chat templates make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsa_engine.demo import demo_folder
from dsa_engine.text.conversations import ConversationFormat
from dsa_engine.text.conversations.messages import conversations
from dsa_engine.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def form(demo_cache: Path) -> ConversationFormat:
    return ConversationFormat(Tokenizer(demo_folder()))


def test_what_a_conversation_may_look_like() -> None:
    parts = [{"type": "output_text", "text": "one"}, {"type": "refusal", "refusal": "two"}, "three"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert conversations(HELLO) == [HELLO]
    assert conversations([HELLO, tuple(HELLO)]) == [HELLO, HELLO]
    parsed = conversations([{"role": "user", "content": parts, "name": "n"}, call])
    assert parsed == [[{"role": "user", "content": "one\ntwo\nthree", "name": "n"}, call]]


@pytest.mark.parametrize(
    "messages, error, message",
    [
        ("hello", TypeError, "a conversation is a list of .*, not 'hello'"),
        ([HELLO, []], ValueError, "the conversation is empty"),
        ([{"role": "user"}], TypeError, "a conversation is a list of"),
        ([{"role": "user", "content": 5}], TypeError, "a conversation is a list of"),
        ([HELLO[0], "x"], TypeError, "a conversation is a list of"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}], ValueError, "text only, not"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], ValueError, "text only, not {'type': 'image_url'"),
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
    with pytest.raises(ValueError, match="failed: TypeError.*chat_template"):
        form.render(HELLO, chat_template_kwargs={"chat_template": "x"})


def test_what_a_template_would_leave_out_is_an_error(form: ConversationFormat) -> None:
    """Tools without words for them, unless the system message names them; messages of a role that is not read."""
    tools = [{"type": "function", "function": {"name": "find_page"}}]
    calls = "{% for m in messages %}{{ m.tools }}{{ m['tools'] }}{{ m.content }}{% endfor %}"
    for given in (tools, [{"function": 5}]):
        with pytest.raises(ValueError, match="has no words for tools.*describe them in the system message"):
            form.render(HELLO, chat_template=calls, tools=given)
    told = [{"role": "system", "content": "Call find_page."}, *HELLO]
    assert form.render(told, chat_template=calls, tools=tools) == "Call find_page.Hello"
    assert "find_page" in form.render(HELLO, chat_template=calls + "{{ tools | tojson }}", tools=tools)

    some = "{% for m in messages %}{% if m.role in ('user', 'critic') %}{{ m.content }};{% endif %}{% endfor %}"
    critic = [*HELLO, {"role": "critic", "content": "Hello"}]
    assert form.render(critic, chat_template=some) == "Hello;Hello;"
    any_role = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    developer = [{"role": "developer", "content": "Be kind"}, *HELLO]
    assert form.render(developer, chat_template=any_role) == "system: Be kind;user: Hello;"
    assert form.render(developer, chat_template=any_role + "{# 'developer' #}").startswith("developer: Be kind;")
    for unknown, template in (("usr", some), ("usr", any_role), ("usr", None)):
        with pytest.raises(ValueError, match=f"has no words for messages of the role '{unknown}'; use system, user"):
            form.render([*HELLO, {"role": unknown, "content": "Hello"}], chat_template=template)


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_one_error(form: ConversationFormat, template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^the chat template that was given failed: .*{reason}[^\n]*$"):
        form.render(HELLO, chat_template=template)


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
        {"role": "user", "content": f"And then?{last}"},
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
