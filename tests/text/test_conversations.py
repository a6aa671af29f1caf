"""Prompts of conversations as released: DeepSeek-V3.2's own form, and the families with Jinja templates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dsa_engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dsa_engine.text.conversations import ConversationFormat, conversation_format
from dsa_engine.text.conversations.deepseek_v32 import TOKENS
from dsa_engine.text.conversations.released_texts import FILE, LARGEST

Message = dict[str, Any]

# The constants of the released file, with words of our own. Nothing else of the file may be run or matter.
RELEASED = '''
raise SystemExit("the file is run")
TOOLS_SYSTEM_TEMPLATE = """## Functions {{of}} <{dsml_token}function_calls> {thinking_start_token}…{thinking_end_token}
{tool_schemas}
"""
response_format_template: str = (
    "## Form\\n\\n"
    "{schema}"
)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSeek-V3.2 without weights: a tokenizer of bytes and the special tokens, and the released file."""
    folder = tmp_path_factory.mktemp("v32")
    write_folder(folder)
    (folder / FILE).parent.mkdir()
    (folder / FILE).write_text(RELEASED)
    return folder


def write_folder(folder: Path, chat_template: str | None = None, words: Sequence[str] = TOKENS) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate([*words, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(words))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": words[0], "eos_token": words[1]}
    config |= {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def form(folder: Path) -> ConversationFormat:
    return conversation_format(folder, "deepseek_v32")


def says(role: str, content: str | None = None, thought: str | None = None, **more: Any) -> Message:
    return {"role": role, "content": content, **({"reasoning_content": thought} if thought else {}), **more}


def calls(*named: tuple[str, Any]) -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)} for name, given in named
    ]
    return {"tool_calls": [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)]}


WEATHER: Message = {"type": "function", "function": {"name": "weather", "parameters": {"ort": "ä", "n": [1, None]}}}
TIME: Message = {"type": "function", "function": {"name": "time", "description": 'a "b"\n'}}
CITY = calls(("weather", {"city": 'Köln "am" Rhein\n<', "days": 3, "of": ["ä", {"x": None}], "now": True}))
BOTH = calls(("weather", {"city": "Rom"}), ("time", "{}"))
FORM = {"type": "object", "properties": {"größe": {"type": "number"}}}
USER, OTHER = says("user", "Hello"), says("user", "And {then}?\n")

CONVERSATIONS: dict[str, list[Message]] = {
    "a question": [USER],
    "an empty question": [says("user", "")],
    "two questions": [USER, OTHER],
    "a system prompt": [says("system", "Be {brief}."), USER],
    "only a system prompt": [says("system", "Be brief.")],
    "a second system prompt": [says("system", "A"), USER, says("system", "B"), OTHER],
    "an answer": [USER, says("assistant", "Hi", "t")],
    "old answers": [USER, says("assistant", "Hi"), OTHER, says("assistant", "So."), USER],
    "old thoughts": [USER, says("assistant", "Hi", "a thought"), OTHER, says("assistant", "So.", "other"), USER],
    "tools": [says("system", "S", tools=[WEATHER, TIME]), USER],
    "a form": [says("system", "S", response_format=FORM), USER],
    "tools and a form": [says("system", "", tools=[TIME], response_format=FORM), USER],
    "a developer": [says("developer", "Search!")],
    "a developer with tools": [says("system", "S"), says("developer", "D", tools=[WEATHER], response_format=FORM)],
    "an old developer": [says("developer", "D", tools=[TIME]), says("assistant", "A", "t"), USER],
    "a developer after a user": [USER, says("assistant", "A", "t"), says("developer", "D")],
    "a call": [USER, says("assistant", None, "t", **CITY)],
    "a call without a thought": [USER, says("assistant", "Let me see.", **CITY)],
    "a result": [USER, says("assistant", "", "t", **CITY), says("tool", "12°")],
    "two results": [USER, says("assistant", "So:", "t", **BOTH), says("tool", "12°"), says("tool", "")],
    "one result of two": [USER, says("assistant", None, "t", **BOTH), says("tool", "12°")],
    "an answer after results": [
        USER,
        says("assistant", None, "t", **BOTH),
        *(says("tool", "12°"), says("tool", "now")),
        says("assistant", "It is 12°", "u"),
    ],
    "calls twice": [
        says("system", "S", tools=[WEATHER, TIME]),
        USER,
        says("assistant", None, "t", **CITY),
        says("tool", "12°"),
        says("assistant", "One more", "u", **BOTH),
        *(says("tool", "a"), says("tool", "b")),
    ],
    "old results": [
        USER,
        says("assistant", None, "t", **BOTH),
        *(says("tool", "12°"), says("tool", "now")),
        says("assistant", "It is", "u"),
        OTHER,
    ],
}
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
        found = []
        if "tools" in message:
            lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in message["tools"])
            found.append(f"## Functions {{of}} <｜DSML｜function_calls> <think>…</think>\n{lines}\n")
        if "response_format" in message:
            found.append("## Form\n\n" + json.dumps(message["response_format"], ensure_ascii=False))
        return found

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


@pytest.mark.parametrize(
    "messages, options, message",
    [
        ([says("developer", "")], {}, "a developer message must have a content that is not empty"),
        (
            [USER, says("assistant", "x")],
            THINKING,
            r"must have reasoning_content or tool_calls, which messages\[1\] has",
        ),
        ([USER, says("tool", "x")], {}, r"messages\[1\] is the result of a tool, and there is no call for it"),
        ([says("tool", "x")], {}, r"messages\[0\] is the result of a tool"),
        ([USER, CALLED, says("tool", "x"), says("tool", "y")], {}, "the assistant made 1 calls, and 1 results came"),
        ([USER, CALLED, USER, says("tool", "x")], {}, "there is no call for it"),
        ([says("judge", "x")], {}, "the roles system, user, developer, assistant and tool, not 'judge'"),
        (
            [USER, says("assistant", "x", **calls(("f", [5])))],
            {},
            r"arguments of 'f' must be a JSON object, not '\[5\]'",
        ),
        ([USER, {**CALLED, "tool_calls": ["f"]}], {}, "a tool call must be .*, not 'f'"),
        ([USER, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {}, "of 'f' are no JSON"),
        ([USER, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}], {}, "are no JSON"),
        ([USER], {"tools": [{"name": "f"}]}, "a tool must be {'type': 'function', 'function': .*, not {'name': 'f'}"),
        ([USER], {"response_format": {"a": {1, 2}}}, "cannot be written as JSON"),
        (
            [USER],
            {"chat_template_kwargs": {"thinkng": True}},
            "are thinking, enable_thinking, drop_thinking, not thinkng",
        ),
        ([USER], {"continue_final_message": True}, "give add_generation_prompt=False with it"),
        ([USER], {"continue_final_message": True, "add_generation_prompt": False}, "of the assistant, not of 'user'"),
        ([USER], {"tool_choice": "required"}, "tool_choice must be 'auto' or 'none', .*, not 'required'"),
        ([says("user", "\udcff")], {}, "the content of a message has half a surrogate pair"),
        (
            [USER, says("assistant", "x", **calls(("f", {"a": "\ud800"})))],
            {},
            "the text of the conversation has half a",
        ),
        (
            [USER, says("assistant", "x", **calls(("f", f'{{"a": {"9" * 5000}}}')))],
            {},
            "the arguments of 'f' are no JSON",
        ),
    ],
)
def test_what_the_form_refuses(form: ConversationFormat, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        form.render(messages, **options)


def test_values_that_are_no_flags(form: ConversationFormat) -> None:
    with pytest.raises(TypeError, match="thinking in chat_template_kwargs must be True or False, not 'yes'"):
        form.render([USER], chat_template_kwargs={"thinking": "yes"})
    with pytest.raises(TypeError, match="response_format must be an object"):
        form.render([USER], response_format="json")
    with pytest.raises(TypeError, match="a conversation is a list of"):
        form.render("Hello")


TOOLS_TEXT = 'TOOLS_SYSTEM_TEMPLATE = "{tool_schemas}"'


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read .* get the file with the model, or leave tools and response_format out"),
        ("x" * (LARGEST + 1), "has 262,145 bytes; at most 262,144 are read"),
        ("def f(:", "is not as released: invalid syntax"),
        (b"\xff\x00", "is not as released: "),
        (b"x = 5\0", "is not as released: "),
        ("(" * 100_000, "is not as released: "),
        ("-" * 100_000 + "5", "is not as released: "),
        ("x = " + "[" * 190 + "]" * 190, "is not as released: it has no text TOOLS_SYSTEM_TEMPLATE"),
        ("TOOLS_SYSTEM_TEMPLATE = 5", "it has no text TOOLS_SYSTEM_TEMPLATE"),
        ("TOOLS_SYSTEM_TEMPLATE: str", "it has no text TOOLS_SYSTEM_TEMPLATE"),
        ("TOOLS_SYSTEM_TEMPLATE = open('x').read()", "is not as released: malformed node"),
        ("def f():\n    TOOLS_SYSTEM_TEMPLATE = '{tool_schemas}'", "it has no text TOOLS_SYSTEM_TEMPLATE"),
        ("TOOLS_SYSTEM_TEMPLATE = 'tools'", r"the fields of TOOLS_SYSTEM_TEMPLATE are \(none\), not dsml_token, "),
        ("TOOLS_SYSTEM_TEMPLATE = '{tool_schemas}{x}'", "are tool_schemas, x, not dsml_token, think"),
        ("TOOLS_SYSTEM_TEMPLATE = '{tool_schemas.__class__}'", "are tool_schemas.__class__, not"),
        ("TOOLS_SYSTEM_TEMPLATE = '{tool_schemas:>99999999999}'", "a field 'tool_schemas' with a form"),
        ("TOOLS_SYSTEM_TEMPLATE = '{tool_schemas!r}'", "a field 'tool_schemas' with a form"),
        ("TOOLS_SYSTEM_TEMPLATE = '{'", "is not as released: "),
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


@pytest.mark.parametrize("kwargs", [{}, {"thinking": True}, {"enable_thinking": False}], ids=str)
def test_templates_give_what_transformers_gives(family: tuple[str, ConversationFormat], kwargs: dict[str, Any]) -> None:
    """Also where a client has the arguments of calls as the other of text and object."""
    name, form = family
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
            as_read, tools=[TIME], tokenize=False, add_generation_prompt=True, **kwargs
        )
        for given in (as_read, turned):
            assert form.render(given, tools=[TIME], chat_template_kwargs=kwargs) == wanted
        compared += 1
    assert compared >= 18


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
        prompt = model.render([USER], tools=tools, chat_template_kwargs=kwargs)
        thought = "hm" if model is other and name != "v31" or kwargs else None
        answer = says("assistant", "Well.", thought, tool_calls=called)
        if model.own_form:
            text = model.render([USER, answer], tools=tools, chat_template_kwargs=kwargs).removeprefix(prompt)
        else:
            text = model.render([USER, answer], tools=tools, add_generation_prompt=False).partition("</think>")[2]
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
    assert other.thoughts is not None and other.thoughts.always == (name == "r1")
    plain = conversation_format(
        other.tokenizer.folder, "x", reasoning_parser="none", tool_call_parser="none", tokenizer=other.tokenizer
    )
    assert not plain.needs_special_tokens and plain.thoughts is None and plain.calls is None
    with pytest.raises(ValueError, match="tool_call_parser must be one of deepseek_v3, .*, none, not 'hermes'"):
        conversation_format(tmp_path, "x", tool_call_parser="hermes")
    with pytest.raises(ValueError, match="has no words for a response_format"):
        other.render([USER], response_format=FORM)
    write_folder(tmp_path, words=("<s>", "</s>"))
    for model_type in ("deepseek_v32", "deepseek_v3"):
        with pytest.raises(ValueError, match="has no chat template; use generate"):
            conversation_format(tmp_path, model_type).render([USER])


@pytest.mark.parametrize(
    "parser, prompt, content, reasoning",
    [
        ("deepseek_v3", "<｜Assistant｜><think>", None, "a"),
        ("deepseek_v3", "<｜Assistant｜><think>\n", None, "a"),
        ("deepseek_v3", "<｜Assistant｜></think>", "a", None),
        ("deepseek_v3", "<｜User｜><think><｜Assistant｜>", "a", None),
        ("deepseek_v3", "<｜Assistant｜><think>so", None, "a"),
        ("deepseek_v3", "<｜Assistant｜><think>so</think>b", "a", None),
        ("deepseek_v3", "<think> of it", "a", None),
        ("deepseek_r1", "<｜Assistant｜>", None, "a"),
        ("deepseek_r1", "<｜Assistant｜><think></think>x<｜end▁of▁sentence｜><tool>", None, "a"),
        ("glm45", "<|user|><think><|assistant|>", "a", None),
        ("none", "<｜Assistant｜><think>", "a", None),
    ],
)
def test_whether_an_answer_begins_in_a_thought(
    form: ConversationFormat, parser: str, prompt: str, content: str | None, reasoning: str | None
) -> None:
    given = conversation_format(form.tokenizer.folder, "x", reasoning_parser=parser, tokenizer=form.tokenizer)
    ((delta,),) = [given.reader(prompt).push("a")]
    assert (delta.content, delta.reasoning) == (content, reasoning)
