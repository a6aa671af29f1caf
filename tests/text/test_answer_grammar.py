"""Grammars of calls and of what follows a thought: what a random writer makes of them is read as they say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from conversation_cases import write_folder
from dsa_engine.config.structured_outputs import StructuredOutputsParams
from dsa_engine.engine.sampling.grammar import without_tags
from dsa_engine.text.conversations import ConversationFormat, conversation_format
from dsa_engine.text.conversations.deltas import message_of

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "°F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "near": {"anyOf": [{"$ref": "#/$defs/at"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["unit", "code"],
    "$defs": {"at": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": PARAMETERS, "now": {"type": "object", "maxProperties": 0}}
ENDS = ("</think>", "</arg_value>", "</｜DSML｜parameter>")
WORDS = ("<b>", "<e>")  # that begin and end a text
TAGS = ("<think>", "</think>", "｜DSML｜", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<tool_call>", "</arg_value>")


LAYOUTS = ("texts", "special tokens", "added tokens")  # those of released tokenizers are the last


def form(folder: Path, layout: str, parser: str, thoughts: str = "none") -> ConversationFormat:
    """A form whose tokenizer has bytes, and the tags as ``layout`` says."""
    special, added = layout == "special tokens", TAGS if layout == "added tokens" else ()
    write_folder(folder, "", words=(*WORDS, *TAGS) if special else WORDS, added=added)
    return conversation_format(folder, "deepseek_v3", tool_call_parser=parser, reasoning_parser=thoughts)


def written(form: ConversationFormat, source: str, seed: int) -> str | None:
    """A random text of a grammar, which prefers what ends a value or goes on with a tag; None if it is too long."""
    hf = form.tokenizer.hf
    tokens = LLTokenizer(without_tags(form.tokenizer), len(hf), [hf.eos_token_id])
    matcher, rng, ids = LLMatcher(tokens, source), random.Random(seed), list[int]()
    closing = {i for i in range(len(hf)) if hf.decode([i]) in ("<", "]", "}", '"', "\n")}
    tags = [form.tokenizer.encode(text, add_special_tokens=False) for text in ENDS]
    while len(ids) < 1500:
        allowed = [i for i, byte in enumerate(matcher.compute_logit_bias()) if byte]
        begun = [tag[n] for tag in tags for n in range(1, len(tag)) if ids[-n:] == tag[:n]]
        preferred = [i for i in allowed if i in begun] or [i for i in allowed if i in closing]
        token = rng.choice(preferred if preferred and rng.random() < (0.95 if begun else 0.3) else allowed)
        if token == hf.eos_token_id:
            return form.tokenizer.decode(ids, skip_special_tokens=False)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parser", ["deepseek_v3", "deepseek_v31", "deepseek_v32", "glm47", "none"])
def test_calls_are_read_as_the_schemas_say(tmp_path: Path, parser: str, layout: str) -> None:
    of_model = form(tmp_path, layout, parser)
    seen: set[str] = set()
    for several, choice in ((True, TOOLS), (False, TOOLS), (False, TOOLS[:1])):
        made = of_model.form_of("", StructuredOutputsParams(json_object=True), choice, several)  # a call wins
        assert made is not None
        for seed in range(12):
            text = written(of_model, made.source(), seed)
            if text is None:
                continue
            reader = of_model.reader("", TOOLS, several, choice)
            message = message_of([*reader.push(text), *reader.finish()])
            calls = message["tool_calls"]
            assert not (message["content"] or "").strip() and (several or len(calls) == 1), text
            for call in calls:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                if parser == "glm47" and "code" in arguments:  # strings without quotes are any text
                    arguments["code"] = "ab"
                jsonschema.validate(arguments, SCHEMAS[name])
                seen.add(name)
    assert seen == {"weather", "now"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prompt, begins", [("<think>", {True}), ("", {False, True}), ("<think></think>", {False})])
def test_a_thought_comes_before_the_form(tmp_path: Path, layout: str, prompt: str, begins: set[bool]) -> None:
    of_model = form(tmp_path, layout, "none", "glm45")
    wanted = of_model.form_of(prompt, StructuredOutputsParams(choice=["yes", "no"]))
    assert wanted is not None
    thought = set()
    for seed in range(30):
        text = written(of_model, wanted.source(), seed)
        if text is not None:
            reader = of_model.reader(prompt, [])
            message = message_of([*reader.push(text), *reader.finish()])
            assert message["content"] in ("yes", "no"), text
            thought.add("</think>" in text)
    assert thought == begins


def test_what_cannot_be_called(tmp_path: Path) -> None:
    of_model = form(tmp_path, "texts", "glm47")
    with pytest.raises(ValueError, match="a tool must be"):
        of_model.form_of("", None, [{"type": "function"}])
    bad = {"name": "a", "parameters": {"properties": {"b": {"type": "none"}}}}
    with pytest.raises(ValueError, match="Invalid type: none"):
        of_model.form_of("", None, [{"type": "function", "function": bad}])
