"""Answers that come in pieces: wherever they are cut, they are the same message; what is malformed is content."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from dsa_engine.text.conversations.deltas import MessageDelta, message_of
from dsa_engine.text.conversations.families import TOOL_CALL_PARSERS
from dsa_engine.text.conversations.reader import MessageReader, Thought
from dsa_engine.text.conversations.source import LONGEST_NAME
from dsa_engine.text.conversations.tool_calls import CallForm

END = "<｜end▁of▁sentence｜>"
TAG = "｜DSML｜"
PARAMETERS = {
    "text": {"type": "string"},
    "perhaps": {"type": ["string", "null"]},
    "number": {"type": "integer"},
    "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    "any": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PARAMETERS}}}
    for name in ("find", 'a "quoted" näme')
]
TEXTS = ["", "Paris", 'a "b"\\\n\t\x01', "ä🙂", "<", "</think", "<｜", "\n\n<", "{", "null", "5", "<tool_call", "[1"]
VALUES = [0, -1.5e-7, 10**30, True, None, [], {}, [1, ["x", {"ä": '"'}]], {"a": {"b": [None, "\\u"]}}]


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


def call_form(name: str) -> CallForm:
    form = TOOL_CALL_PARSERS[name]
    assert form is not None
    return form


def write_v32(calls: Sequence[Call]) -> str:
    lines = [f"\n\n<{TAG}function_calls>"]
    for call in calls:
        lines.append(f'<{TAG}invoke name="{call.name}">')
        for key, value in call.arguments.items():
            is_text = isinstance(value, str)
            written = value if is_text else json.dumps(value, ensure_ascii=False)
            word = "true" if is_text else "false"
            lines.append(f'<{TAG}parameter name="{key}" string="{word}">{written}</{TAG}parameter>')
        lines.append(f"</{TAG}invoke>")
    return "\n".join([*lines, f"</{TAG}function_calls>"])


def write_v31(calls: Sequence[Call]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{json.dumps(c.arguments)}<｜tool▁call▁end｜>" for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def write_r1(calls: Sequence[Call]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{json.dumps(c.arguments, indent=1)}\n```"
        "<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"\n<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"


def write_glm(calls: Sequence[Call]) -> str:
    text = ""
    for call in calls:
        text += f"\n<tool_call>{call.name}\n"
        for key, value in call.arguments.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n"
        text += "</tool_call>"
    return text


WRITERS = {"deepseek_v32": write_v32, "deepseek_v31": write_v31, "deepseek_v3": write_r1, "glm47": write_glm}


class Answer(NamedTuple):
    parser: str
    thought: Thought
    text: str
    message: dict[str, Any]

    def reader(self, several_calls: bool = True) -> MessageReader:
        return MessageReader(self.thought, call_form(self.parser), TOOLS, (END, "<|user|>"), several_calls)


def make_answer(parser: str, rng: random.Random) -> Answer:
    """A well-formed answer of a family, and its message."""
    thought = rng.choice(["", *TEXTS]) if rng.random() < 0.7 else None
    content = "".join(rng.choices(TEXTS[:-2], k=rng.randint(0, 3))) + rng.choice(["", "x"])
    calls = [Call(rng.choice(TOOLS)["function"]["name"], make_arguments(rng)) for _ in range(rng.choice([0, 0, 1, 3]))]
    text = content + (WRITERS[parser](calls) if calls else "") + rng.choice(["", END])
    opens = rng.random() < 0.5 and not (thought or "").startswith("</think")
    state = Thought.NONE
    if thought is not None:
        text = ("" if opens else rng.choice(["<think>", "\n<think>"])) + thought + "</think>" + text
        state = Thought.OPEN if opens else Thought.POSSIBLE
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [(call.name, call.arguments) for call in calls]
    return Answer(parser, state, text, message)


def make_arguments(rng: random.Random) -> dict[str, Any]:
    values = {
        "text": rng.choice(TEXTS),
        "perhaps": rng.choice([*TEXTS[:5], None]),
        "number": rng.randint(-5, 5),
        "either": rng.choice(["5", True, "ab"]),
        "any": rng.choice([*TEXTS[:3], *VALUES]),
    }
    return {key: values[key] for key in rng.sample(sorted(values), rng.randint(0, len(values)))}


def deltas_of(reader: MessageReader, pieces: Iterable[str]) -> list[MessageDelta]:
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    return deltas + reader.finish()


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def read(reader: MessageReader, *pieces: str) -> dict[str, Any]:
    """The message, with its calls as pairs of name and arguments: the object, or a text that is none."""
    return named_calls(message_of(deltas_of(reader, pieces)))


def named_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in message:
        calls = [call["function"] for call in message["tool_calls"]]
        message["tool_calls"] = [(call["name"], loaded(call["arguments"])) for call in calls]
    return message


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("parser", WRITERS)
def test_answers_cut_anywhere(parser: str) -> None:
    """200 answers in all: each is the message that was written, cut at every character and at random."""
    rng = random.Random(f"answers of {parser}")
    for _ in range(50):
        answer = make_answer(parser, rng)
        assert read(answer.reader(), answer.text) == answer.message, answer.text
        assert read(answer.reader(), *answer.text) == answer.message, answer.text
        cuts = rng.sample(range(len(answer.text) + 1), min(len(answer.text), rng.randint(1, 8)))
        assert read(answer.reader(), *cut(answer.text, cuts)) == answer.message, (answer.text, cuts)
        first = {name: value[:1] if name == "tool_calls" else value for name, value in answer.message.items()}
        assert read(answer.reader(False), *cut(answer.text, cuts)) == first, (answer.text, cuts)


@pytest.mark.parametrize("parser", WRITERS)
def test_damaged_answers_cut_anywhere(parser: str) -> None:
    """Answers that lost, doubled or mixed up pieces are no error, and the same message wherever they are cut."""
    rng = random.Random(f"damage to {parser}")
    for _ in range(40):
        text = "".join(make_answer(parser, rng).text for _ in range(2))
        for _ in range(rng.randint(1, 3)):
            a, b = sorted(rng.choices(range(len(text) + 1), k=2))
            text = rng.choice([text[:a] + text[b:], text[:b] + text[a:], text[:a] + text[a + 1 :], text[:b]])
        whole = read(Answer(parser, Thought.POSSIBLE, "", {}).reader(), text)
        assert read(Answer(parser, Thought.POSSIBLE, "", {}).reader(), *text) == whole
        pieces = cut(text, [rng.randint(0, len(text))])
        assert read(Answer(parser, Thought.POSSIBLE, "", {}).reader(), *pieces) == whole
        assert json.dumps(whole, ensure_ascii=False).count("call_") == text.count("call_"), "no id is in a text"


PARAMETER = f'<{TAG}parameter name="a" string="true">x</{TAG}parameter>\n'
CALL = f'<{TAG}function_calls>\n<{TAG}invoke name="f">\n{PARAMETER}'


@pytest.mark.parametrize(
    "parser, text, content, calls",
    [
        ("deepseek_v32", f"see\n\n<{TAG}function_calls> is a tag", ..., None),
        ("deepseek_v32", f"<{TAG}function_calls>\n</{TAG}function_calls>", ..., None),
        ("deepseek_v32", f'<{TAG}function_calls>\n<{TAG}invoke name="f">\ntext', ..., None),
        ("deepseek_v32", f'<{TAG}function_calls>\n<{TAG}invoke name="f', ..., None),
        ("deepseek_v32", f'<{TAG}function_calls>\n<{TAG}invoke name="">\n</{TAG}invoke>', ..., None),
        ("deepseek_v32", CALL + f"</{TAG}invoke>\n", None, [("f", {"a": "x"})]),
        ("deepseek_v32", CALL + f"</{TAG}invoke>\n<{TAG}inv", None, [("f", {"a": "x"})]),
        ("deepseek_v32", CALL + "words", "\nwords", [("f", '{"a": "x"')]),
        ("deepseek_v32", CALL + PARAMETER, "\n" + PARAMETER, [("f", '{"a": "x"')]),
        ("deepseek_v32", CALL[: CALL.index("x</") + 1], None, [("f", '{"a": "x')]),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}", ..., None),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[5]<｜tool▁call▁end｜>", ..., None),
        (
            "deepseek_v31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 5,}',
            "}",
            [("f", '{"a": 5,')],
        ),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}", ..., None),
        ("glm47", "<tool_call>I would call\na tool</tool_call>", ..., None),
        ("glm47", "<tool_call></tool_call>", ..., None),
        ("glm47", "<tool_call>f<arg_key>a</arg_key>5</tool_call>", ..., None),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>", None, [("f", {"a": 5})]),
        ("glm47", "<tool_call>f</tool_call> done", "done", [("f", {})]),
        # An end tag that is missing, and one that comes twice.
        (
            "deepseek_v32",
            CALL.replace(f"x</{TAG}parameter>", "x") + PARAMETER,
            PARAMETER,
            [("f", '{"a": "x\\n')],
        ),
        ("deepseek_v32", f"{CALL}</{TAG}invoke>\n" + f"</{TAG}function_calls>\n" * 2, None, [("f", {"a": "x"})]),
        (
            "glm47",
            "<tool_call>find<arg_key>text</arg_key><arg_value>x<arg_key>b</arg_key></tool_call>",
            "<arg_key>b</arg_key></tool_call>",
            [("find", '{"text": "x')],
        ),
        ("glm47", "<tool_call>f</tool_call>\n</tool_call>\n<tool_call>g</tool_call>", None, [("f", {}), ("g", {})]),
    ],
)
def test_malformed_calls_are_content(parser: str, text: str, content: Any, calls: Any) -> None:
    """... is all of the text. A call that has begun stays unfinished, so that no client runs half of it."""
    whole = read(MessageReader(Thought.NONE, call_form(parser), TOOLS), text)
    assert whole["content"] == (text if content is ... else content)
    assert whole.get("tool_calls") == calls
    assert read(MessageReader(Thought.NONE, call_form(parser), TOOLS), *text) == whole


def test_what_is_no_thought_and_no_call() -> None:
    thinks = "<think>a</think>b<tool_call>f</tool_call>"
    assert read(MessageReader(), thinks) == {"role": "assistant", "content": thinks}
    assert read(MessageReader(Thought.POSSIBLE), "  b<think>c")["content"] == "  b<think>c"
    assert read(MessageReader(Thought.POSSIBLE), "<thi")["content"] == "<thi"
    assert read(MessageReader(Thought.OPEN), "\n a")["reasoning_content"] == "\n a"
    assert read(MessageReader(end_tokens=[END]), f"a{END}b", END[:5])["content"] == f"ab{END[:5]}"
    assert read(MessageReader(Thought.OPEN), "a</think>", "") == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "a",
    }


@pytest.mark.parametrize(
    "text, whole, message",
    [
        ("It is noon.", True, {"reasoning_content": "It is noon.", "content": "It is noon."}),
        ("It is", False, {"reasoning_content": "It is"}),  # the length ended it: it may have been thinking still
        ("I\n<tool_call>f</tool_call>", True, {"reasoning_content": "I", "content": None, "tool_calls": [("f", {})]}),
        ("a <tool_call> is a tag</think>b", True, {"reasoning_content": "a <tool_call> is a tag", "content": "b"}),
        ("a</think>\n</think>b", True, {"reasoning_content": "a", "content": "b"}),
        ("a</think>\n</b>", True, {"reasoning_content": "a", "content": "\n</b>"}),
    ],
)
def test_thoughts_that_do_not_end_by_their_tag(text: str, whole: bool, message: dict[str, Any]) -> None:
    for pieces in ([text], list(text)):
        reader = MessageReader(Thought.OPEN, call_form("glm47"), TOOLS)
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish(whole)
        assert named_calls(message_of(deltas)) == {"role": "assistant", "content": ""} | message


LEVEL = {"enum": ["1", "true"], "type": "string"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Level"},
        {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}], "default": None},
        {"allOf": [{"$ref": "#/$defs/Level"}], "description": "x"},
        {"allOf": [{"type": "string"}, {"minLength": 1}]},
        {"enum": ["1", "true"]},
        {"oneOf": [{"const": "1"}, {"const": "true"}]},
    ],
    ids=str,
)
def test_schemas_that_say_string_in_other_words(schema: dict[str, Any]) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"Level": LEVEL, "loop": {"$ref": "#/$defs/loop"}}}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    for value in ("1", "true"):
        text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert read(MessageReader(Thought.NONE, call_form("glm47"), tools), text)["tool_calls"] == [("f", {"a": value})]


def test_pieces_come_as_early_as_they_are_certain() -> None:
    reader = MessageReader(Thought.OPEN, call_form("deepseek_v32"), TOOLS)
    assert reader.push("I th") == [MessageDelta("reasoning", "I th")]
    assert reader.push("ink.</thi") == [MessageDelta("reasoning", "ink.")]
    assert reader.push("nk>Yes\n") == [MessageDelta("content", "Yes")], "the newline may belong to calls"
    assert reader.push(f"\n<{TAG}function_calls>\n<{TAG}invoke name=") == []
    ((delta,),) = [reader.push(f'"f">\n<{TAG}parameter name="a" string="true">x"')]
    assert (delta.number, delta.name, delta.text) == (0, "f", '{"a": "x\\"') and delta.id
    ((delta,),) = [reader.push("y</")]
    assert delta == MessageDelta("call", "y")
    ((delta,),) = [reader.push(f"{TAG}parameter>\n</{TAG}invoke>\n<{TAG}invoke")]
    assert delta == MessageDelta("call", '"}')
    ((delta,),) = [reader.push(f' name="g">\n</{TAG}invoke>')]
    assert (delta.number, delta.name, delta.text) == (1, "g", "{}")
    assert reader.finish() == [] and reader.finish() == []
    reader = MessageReader(Thought.NONE, call_form("deepseek_v31"), TOOLS)
    pieces = deltas_of(reader, ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", '{"a"', ": 5", "5}"])
    assert [delta.text for delta in pieces] == ['{"a"', ": 5", "5}"]


def test_a_name_has_an_end() -> None:
    """Text after something like a tag is not held back for ever."""
    reader = MessageReader(Thought.NONE, call_form("glm47"), TOOLS)
    assert reader.push("<tool_call>" + "x" * LONGEST_NAME) == []
    assert message_of(reader.push("y" * 20))["content"].startswith("<tool_call>xxx")


def test_half_surrogates_and_huge_numbers() -> None:
    digits = "9" * 10_000
    text = "a\udcff<tool_call>find<arg_key>number</arg_key><arg_value>" + digits + "</arg_value>"
    text += "<arg_key>text</arg_key><arg_value>\udcff</arg_value></tool_call>"
    message = message_of(deltas_of(MessageReader(Thought.NONE, call_form("glm47"), TOOLS), text))
    assert message["content"] == "a\udcff"
    assert message["tool_calls"][0]["function"]["arguments"] == f'{{"number": {digits}, "text": "\udcff"}}'


@pytest.mark.parametrize(
    "schema", [None, 5, {"type": 5}, {"type": [5, None]}, {"anyOf": [5]}, {"anyOf": {}}, [], {"$ref": "#/x"}]
)
def test_schemas_that_say_nothing(schema: Any) -> None:
    text = write_glm([Call("f", {"a": 5, "b": "x"})])
    for tools in (
        [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}],
        [{"function": {"name": "f", "parameters": schema}}],
        [{"name": "f"}, schema],
        [schema, {"function": schema}],
    ):
        assert read(MessageReader(Thought.NONE, call_form("glm45"), tools), text)["tool_calls"] == [
            ("f", {"a": 5, "b": "x"})
        ]
