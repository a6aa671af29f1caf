"""Conversations of the families with Jinja templates, and which form a folder has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conversation_cases import CONVERSATIONS, FORM, TIME, USER, Message, calls, says, write_folder, write_v32_folder
from dsa_engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dsa_engine.text.conversations import ConversationFormat, conversation_format
from dsa_engine.text.conversations.reader import Thought


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ConversationFormat:
    return conversation_format(write_v32_folder(tmp_path_factory.mktemp("v32")), "deepseek_v32")


# Templates of our own with the tokens of the families.
V31 = """{{ bos_token }}{% set ns = namespace(open=false) %}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% endif %}
{%- if m.role == 'user' %}{% set ns.open = true %}{{ '<｜User｜>' + m['content'] }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<｜Assistant｜></think>' if ns.open }}{% set ns.open = false %}
{%- if m['tool_calls'] is defined %}{{ '' if m['content'] is none else m['content'] }}<｜tool▁calls▁begin｜>
{%- for t in m['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + t['function']['name'] + '<｜tool▁sep｜>' }}
{{- t['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>
{%- else %}{{ m.content }}{% endif %}{{ eos_token }}{% endif %}
{%- if m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt and ns.open %}<｜Assistant｜>
{{- '<think>' if thinking else '</think>' }}{% endif %}"""
R1 = (
    V31.replace("'<｜tool▁call▁begin｜>' +", "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' +")
    .replace("+ '<｜tool▁sep｜>' }}", "+ '\n```json\n' }}")
    .replace("'<｜tool▁call▁end｜>'", "'\n```<｜tool▁call▁end｜>'")
    .replace("{{- '<think>' if thinking else '</think>' }}", "")
)
GLM = """[gMASK]<sop>{% for t in tools or [] %}{{ t | tojson(ensure_ascii=False) }}{% endfor %}{% for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}<|observation|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|><think>{{ m.reasoning_content }}</think>{{ m.content or '' }}
{%- for t in m.tool_calls or [] %}<tool_call>{{ t.function.name }}
{%- for k, v in t.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>
{{- v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- else %}<|system|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}{% endif %}"""
FAMILIES = {"v31": V31, "r1": R1, "glm": GLM}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ConversationFormat]:
    folder = tmp_path_factory.mktemp(request.param)
    write_folder(folder, FAMILIES[request.param])
    return request.param, conversation_format(folder, "deepseek_v32")


BROKEN = ('{"zone": "Eu', 5, ["x"])


@pytest.mark.parametrize("arguments, read", [("", {}), (None, {}), *((one, {"arguments": one}) for one in BROKEN)])
def test_history_with_a_broken_turn(
    form: ConversationFormat, family: tuple[str, ConversationFormat], arguments: Any, read: dict[str, Any]
) -> None:
    """Clients send back what they got, also a call that was cut off."""

    def history(arguments: Any) -> list[Message]:
        call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
        broken, result = {"role": "assistant", "content": None}, {"role": "tool", "tool_call_id": "c", "content": None}
        return [USER, says("assistant", "", tool_calls=[call]), result, USER, broken, USER]

    for of_model in (form, family[1]):
        assert of_model.render(history(arguments)) == of_model.render(history(json.dumps(read)))


@pytest.mark.parametrize("kwargs", [{}, {"thinking": True}, {"enable_thinking": False}], ids=str)
def test_templates_give_what_transformers_gives(family: tuple[str, ConversationFormat], kwargs: dict[str, Any]) -> None:
    """Also where a client has the arguments of calls as the other of text and object."""
    name, form = family
    tools = [TIME] if name == "glm" else None  # the other templates have no words for them
    compared = 0
    for messages in CONVERSATIONS.values():
        if any(m["role"] == "developer" for m in messages):
            continue
        as_read = json.loads(json.dumps([{k: v for k, v in m.items() if k != "tools"} for m in messages]))
        turned = json.loads(json.dumps(as_read))
        functions = [
            (a["function"], b["function"])
            for one, other in zip(as_read, turned, strict=True)
            for a, b in zip(one.get("tool_calls", ()), other.get("tool_calls", ()), strict=True)
        ]
        for read, other in functions:
            as_object = json.loads(read["arguments"])
            texts = (as_object, json.dumps(as_object, ensure_ascii=False))
            read["arguments"], other["arguments"] = texts if name == "glm" else texts[::-1]
        wanted = form.tokenizer.hf.apply_chat_template(
            as_read, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
        for given in (as_read, turned):
            assert form.render(given, tools=tools, chat_template_kwargs=kwargs) == wanted
        compared += 1
    assert compared >= 18


def test_a_missing_content(form: ConversationFormat) -> None:
    """It is None for a template that asks for that, and empty for one that would print None."""
    messages = [USER, says("assistant", **calls(("f", {})))]
    assert form.render(messages, chat_template="{{ messages[1]['content'] is none }}") == "True"
    assert form.render(messages, chat_template="<{{ messages[1].content }}>") == "<>"


def message_of_text(form: ConversationFormat, prompt: str, text: str, tools: Sequence[Any] = ()) -> Message:
    """The message of an output of this text, as LLM.chat makes it; the text of the output has no special tokens."""
    ids = form.tokenizer.encode(text, add_special_tokens=False)
    shown = form.tokenizer.decode(ids)
    one = CompletionOutput(0, shown, ids, "stop", RequestMetrics(0.0, None))
    output = RequestOutput("7", prompt, [], [one])
    form.add_messages(output, [USER, {"role": "system", "tools": tools}], None)
    assert output.text == shown and output.message is not None
    return output.message


def test_answers_of_the_families(family: tuple[str, ConversationFormat], form: ConversationFormat) -> None:
    """What a template writes as the assistant's message is read as that message."""
    name, other = family
    tools = [{"type": "function", "function": {"name": "f"}}, TIME]
    answers: list[tuple[ConversationFormat, dict[str, Any]]] = [(form, {"thinking": True}), (form, {}), (other, {})]
    answers += [(other, {"thinking": True})] if name == "v31" else []
    called = calls(("f", {"a": "x ä", "b": [1, {"c": None}]}), ("time", {}))["tool_calls"]
    for model, kwargs in answers:
        told = tools if model.own_form or name == "glm" else None  # the other templates have no words for them
        prompt = model.render([USER], tools=told, chat_template_kwargs=kwargs)
        thought = "hm" if model is other and name != "v31" or kwargs else None
        answer = says("assistant", "Well.", thought, tool_calls=called)
        if model.own_form:
            text = model.render([USER, answer], tools=told, chat_template_kwargs=kwargs).removeprefix(prompt)
        else:
            text = model.render([USER, answer], tools=told, add_generation_prompt=False).partition("</think>")[2]
            text = (f"{thought}</think>" if thought else "") + text
        message = message_of_text(model, prompt, text, tools)
        assert [call.pop("id") for call in message["tool_calls"]] == ["call_7_0_0", "call_7_0_1"]
        for call, wanted in zip(message["tool_calls"], called, strict=True):
            assert json.loads(call["function"]["arguments"]) == json.loads(wanted["function"]["arguments"])
            assert call["function"]["name"] == wanted["function"]["name"]
        assert message["content"] == "Well." and message.get("reasoning_content") == thought
        assert "tool_calls" not in message_of_text(model, prompt, text), "without tools, calls are content"


def test_which_form_a_folder_has(
    form: ConversationFormat, family: tuple[str, ConversationFormat], tmp_path: Path
) -> None:
    name, other = family
    assert form.own_form and not other.own_form and form.needs_special_tokens and other.needs_special_tokens
    assert other.end_tokens == (("<|user|>", "<|observation|>") if name == "glm" else ())
    assert other.thoughts is (Thought.OPEN if name == "r1" else Thought.POSSIBLE)
    plain = conversation_format(
        other.tokenizer.folder, "x", reasoning_parser="none", tool_call_parser="none", tokenizer=other.tokenizer
    )
    assert not plain.needs_special_tokens and plain.thoughts is Thought.NONE and plain.calls is None
    with pytest.raises(ValueError, match="tool_call_parser must be one of deepseek_v3, .*, none, not 'hermes'"):
        conversation_format(tmp_path, "x", tool_call_parser="hermes")
    assert other.render([USER], response_format=FORM) == other.render([USER]), "it has no words for it"
    write_folder(tmp_path, words=("<s>", "</s>"))
    for model_type in ("deepseek_v32", "deepseek_v3"):
        with pytest.raises(ValueError, match="has no chat template; use generate"):
            conversation_format(tmp_path, model_type).render([USER])


@pytest.mark.parametrize(
    "parser, prompt, kind",
    [
        ("deepseek_v3", "<｜Assistant｜><think>", "reasoning"),
        ("deepseek_v3", "<｜Assistant｜><think>\n", "reasoning"),
        ("deepseek_v3", "<｜Assistant｜></think>", "content"),
        ("deepseek_v3", "<｜User｜><think><｜Assistant｜>", "content"),
        ("deepseek_v3", "<｜Assistant｜><think>so", "reasoning"),
        ("deepseek_v3", "<｜Assistant｜><think>so</think>b", "content"),
        ("deepseek_v3", "<think> of it", "content"),
        ("deepseek_r1", "<｜Assistant｜>", "reasoning"),
        ("deepseek_r1", "<｜Assistant｜><think></think>x<｜end▁of▁sentence｜><tool>", "reasoning"),
        ("glm45", "<|user|><think><|assistant|>", "content"),
        ("none", "<｜Assistant｜><think>", "content"),
    ],
)
def test_whether_an_answer_begins_in_a_thought(form: ConversationFormat, parser: str, prompt: str, kind: str) -> None:
    given = conversation_format(form.tokenizer.folder, "x", reasoning_parser=parser, tokenizer=form.tokenizer)
    ((delta,),) = [given.reader(prompt).push("a")]
    assert (delta.kind, delta.text) == (kind, "a")
