"""The forms in which models write tool calls, and their readers.

A reader begins after the tag that opens the calls. A call is given out once its name and the tag after it are certain,
and its arguments as they come. Where a call loses its form after that, its arguments stay unfinished, so that no client
runs half a call, and what follows is content.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any

from dsa_engine.text.conversations.answer_grammar import Function, GrammarWriter, functions_of, resolved
from dsa_engine.text.conversations.deltas import MessageWriter
from dsa_engine.text.conversations.json_scanner import JsonScanner, is_json
from dsa_engine.text.conversations.source import LostForm, Steps, Tags, TextEnded, TextSource

_TYPES = {"{": "object", "[": "array", '"': "text in quotes", "t": "boolean", "f": "boolean", "n": "null"}


class CallForm(ABC):
    """A form of tool calls."""

    tags: tuple[str, ...]  # what opens the calls, without the newlines before it
    end: str  # what closes them
    around: tuple[str, str] = ("", "")  # what a model writes before all calls and after them
    between = ""  # and what between two

    @abstractmethod
    def read(self, source: TextSource, calls: MessageWriter, tools: Sequence[Any]) -> Steps[None]:
        """Reads what follows one of the tags, up to the end of the calls."""

    @abstractmethod
    def call(self, writer: GrammarWriter, function: Function) -> str:
        """The grammar of a call."""

    def grammar(self, writer: GrammarWriter, tools: Sequence[Any], several: bool) -> str:
        """The grammar of an answer that calls one of the tools, or with ``several`` some of them."""
        call = writer.rule(" | ".join(self.call(writer, function) for function in functions_of(tools)))
        begin, between, end = map(writer.literal, (self.around[0], self.between, self.around[1]))
        return f"{begin} {call} {f'({between} {call})*' if several else ''} {end}".strip()


class TaggedCalls(CallForm):
    """DeepSeek-V3.2: each parameter has tags of its own, which say whether its value is a text or JSON."""

    _TAG = "｜DSML｜"
    _CALL, _CALL_END = f'<{_TAG}invoke name="', f"</{_TAG}invoke>"
    _PARAMETER, _PARAMETER_END = f'<{_TAG}parameter name="', Tags(f"</{_TAG}parameter>")
    end = f"</{_TAG}function_calls>"
    _VALUE_ENDS = Tags(*_PARAMETER_END.texts, _PARAMETER, _CALL_END, end)
    _NAME_END, _TEXT_KEY_END = Tags('">'), '" string="true">'
    _KEY_END = Tags(_TEXT_KEY_END, '" string="false">')
    tags = (f"<{_TAG}function_calls>",)
    around = f"\n\n{tags[0]}\n", end

    def read(self, source: TextSource, calls: MessageWriter, tools: Sequence[Any]) -> Steps[None]:
        yield from source.expect(self._CALL)
        tag = self._CALL
        while tag == self._CALL:
            name, _ = yield from source.name(self._NAME_END)
            tag = yield from source.expect(self._PARAMETER, self._CALL_END)
            call = _Call(source, calls, name)
            while tag == self._PARAMETER:
                key, key_end = yield from source.name(self._KEY_END)
                types = {"string"} if key_end == self._TEXT_KEY_END else set()
                yield from call.read_parameter(key, types, self._VALUE_ENDS)
                tag = yield from source.expect(self._PARAMETER, self._CALL_END)
            call.end_parameters()
            tag = yield from source.expect(self._CALL, self.end)

    def call(self, writer: GrammarWriter, function: Function) -> str:
        parts, (end,) = [writer.literal(f'{self._CALL}{function.name}">\n')], self._PARAMETER_END.texts
        newline = writer.literal("\n")
        for name, schema, required in function.fields:
            is_text, value = writer.value(schema, end)
            begin = writer.literal(f'{self._PARAMETER}{name}" string="{"true" if is_text else "false"}">')
            parts.append(f"({begin} {value} {newline}){'' if required else '?'}")
        return " ".join([*parts, writer.literal(f"{self._CALL_END}\n")])


class PairedCalls(CallForm):
    """GLM-4.5 to GLM-5: pairs of a key and a value, which is a text or JSON by the schema of the tool."""

    _KEY, _VALUE, end = "<arg_key>", "<arg_value>", "</tool_call>"
    _NAME_END, _KEY_END, _VALUE_END = Tags("\n", _KEY, end), Tags("</arg_key>"), Tags("</arg_value>")
    _VALUE_ENDS = Tags(*_VALUE_END.texts, _KEY, _VALUE, end)
    tags = ("<tool_call>",)

    def read(self, source: TextSource, calls: MessageWriter, tools: Sequence[Any]) -> Steps[None]:
        yield from source.space()
        name, tag = yield from source.name(self._NAME_END)
        if tag == "\n":
            tag = yield from source.expect(self._KEY, self.end)
        name = name.strip()
        call = _Call(source, calls, name)
        while tag == self._KEY:
            key, _ = yield from source.name(self._KEY_END)
            yield from source.expect(self._VALUE)
            key = key.strip()
            yield from call.read_parameter(key, _parameter_types(tools, name, key), self._VALUE_ENDS)
            tag = yield from source.expect(self._KEY, self.end)
        call.end_parameters()

    def call(self, writer: GrammarWriter, function: Function) -> str:
        parts, (key_end,), (value_end,) = [], self._KEY_END.texts, self._VALUE_END.texts
        for name, schema, required in function.fields:
            _, value = writer.value(schema, value_end, as_text="string" in _types(schema, schema))
            begin = writer.literal(f"{self._KEY}{name}{key_end}{self._VALUE}")
            parts.append(f"({begin} {value}){'' if required else '?'}")
        return " ".join([writer.literal(self.tags[0] + function.name), *parts, writer.literal(self.end)])


class JsonCalls(CallForm):
    """DeepSeek-V3.1 and V3.2-Exp: a name and one JSON object. ``fenced``: V3's and R1's form, the object in a fence."""

    _CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    end = "<｜tool▁calls▁end｜>"
    _NAME_END, _LINE_END = Tags(_SEPARATOR), Tags("\n")
    tags = ("<｜tool▁calls▁begin｜>",)
    around = tags[0], end

    def __init__(self, fenced: bool = False):
        self._fenced = fenced

    def read(self, source: TextSource, calls: MessageWriter, tools: Sequence[Any]) -> Steps[None]:
        tag = yield from source.expect(self._CALL)
        while tag == self._CALL:
            name, _ = yield from source.name(self._NAME_END)
            if self._fenced:  # before the separator is the type of the call, "function"
                name, _ = yield from source.name(self._LINE_END)
                yield from source.expect("```json")
            yield from source.space()
            scanner, call = JsonScanner(of_object=True), _Call(source, calls, name.strip())
            yield from source.scan(scanner.scan, call.write)
            if not scanner.complete:
                raise LostForm
            if self._fenced:
                yield from source.expect("```")
            yield from source.expect(self._CALL_END)
            tag = yield from source.expect(self._CALL, self.end)

    def call(self, writer: GrammarWriter, function: Function) -> str:
        begin = f"function{self._SEPARATOR}{function.name}\n```json\n"
        before, after = (begin, "\n```") if self._fenced else (function.name + self._SEPARATOR, "")
        begin, end = writer.literal(self._CALL + before), writer.literal(after + self._CALL_END)
        return f"{begin} {writer.json(function.parameters)} {end}"


class PlainCalls(CallForm):
    """A list of names and objects, for calls that a grammar forces where the model's own form is not known."""

    _NAME_END = Tags('", "arguments": ')
    tags, end = ('[{"name": "',), "]"
    around = "[", "]"
    between = ", "

    def read(self, source: TextSource, calls: MessageWriter, tools: Sequence[Any]) -> Steps[None]:
        more = True
        while more:
            name, _ = yield from source.name(self._NAME_END)
            scanner, call = JsonScanner(of_object=True), _Call(source, calls, name)
            yield from source.scan(scanner.scan, call.write)
            if not scanner.complete:
                raise LostForm
            yield from source.expect("}")
            more = (yield from source.expect(', {"name": "', "]")) != "]"

    def call(self, writer: GrammarWriter, function: Function) -> str:
        begin = writer.literal(f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": ')
        return f"{begin} {writer.json(function.parameters)} {writer.literal('}')}"


class _Call:
    """One call: begun with the first text of its arguments. What it has written is no content any more."""

    def __init__(self, source: TextSource, calls: MessageWriter, name: str):
        self._source, self._calls, self._name = source, calls, name
        self._begun = False
        self._keys: set[str] = set()

    def write(self, text: str) -> None:
        """Adds text of the arguments."""
        if not text:
            return
        if not self._begun:
            self._calls.begin_call(self._name)
            self._begun = True
        self._calls.arguments(text)
        self._source.mark()

    def read_parameter(self, key: str, types: Set[str], stops: Tags) -> Steps[None]:
        """Reads a value up to its end tag. A text is written as it comes; another value when it is whole: JSON, or
        else a text.

        Args:
            types: the JSON types that the value may have; empty: any.
            stops: the end tag, and after it the form's other tags, before which it must come.
        """
        if key in self._keys:
            raise LostForm
        self.write(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        pieces: list[str] = []
        is_text = types == {"string"}
        if is_text:
            self.write('"')
        take = (lambda text: self.write(_escaped(text))) if is_text else pieces.append
        tag = yield from self._source.until(stops, take)
        if tag is None:
            raise TextEnded
        if tag != stops.texts[0]:  # a whole call would have markup, and what follows, in its argument
            self._source.mark("".join(pieces) + tag)
            raise LostForm
        self.write('"' if is_text else _value("".join(pieces), types))

    def end_parameters(self) -> None:
        """Ends the arguments after the last parameter."""
        self.write("}" if self._keys else "{}")


def _escaped(text: str) -> str:
    """A text, or a piece of it, as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str, types: Set[str]) -> str:
    """The JSON of a value: the text itself if it is JSON, of a type that the value may have; else a string of it."""
    value = text.strip()
    if is_json(value) and ("string" not in types or _TYPES.get(value[0], "number") in types):
        return value
    return f'"{_escaped(text)}"'


def _types(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """The JSON types that a schema in ``root`` allows; empty if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    given = schema.get("type")
    types = {one for one in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(one, str)}
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(allowed, (list, tuple)):
        types = {"string" if isinstance(one, str) else _TYPES.get(json.dumps(one)[0], "number") for one in allowed}
    for kind in ("anyOf", "oneOf", "allOf"):
        options = schema.get(kind)
        for one in options if isinstance(options, (list, tuple)) else ():
            types |= _types(one, root, depth + 1)
    return types | {"number"} if "integer" in types else types


def _parameter_types(tools: Sequence[Any], function: str, parameter: str) -> set[str]:
    for tool in tools:
        schema = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(schema, Mapping) and schema.get("name") == function:
            root = schema = schema.get("parameters")
            for key in ("properties", parameter):
                schema = schema.get(key) if isinstance(schema, Mapping) else None
            return _types(schema, root)
    return set()
