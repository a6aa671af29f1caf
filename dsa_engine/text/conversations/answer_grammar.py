"""Grammars of answers in Lark's syntax, as llguidance reads it: calls of tools, and what follows a thought."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dsa_engine.config.checks import shown
from dsa_engine.config.structured_outputs import WHITE_SPACE, lark_grammar

_SHAPES = {"pattern", "format", "minLength", "maxLength", "allOf", "anyOf", "oneOf", "not", "$ref"}


class GrammarWriter:
    """Writes the rules of a grammar. ``special``: ids of the tokens that no text contains, by their texts."""

    def __init__(self, special: Mapping[str, int]):
        self._special, self._rules = special, list[str]()
        self._split = re.compile("|".join(f"({re.escape(text)})" for text in special) or "(?!)")

    def rule(self, body: str, how: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{how}: {body}")
        return name

    def literal(self, text: str) -> str:
        """This text, with special tokens in it."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
        )

    def until(self, end: str) -> str:
        """Any text up to ``end``, and that."""
        if self._split.search(end):  # no text contains it
            return f"/(?s:.*)/ {self.literal(end)}"
        escaped = re.escape(end).replace("/", r"\/")
        return self.rule(f"/(?s:.*){escaped}/", "[lazy]")

    def json(self, schema: Any) -> str:
        spaces = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self.rule(f"%json {json.dumps((schema if isinstance(schema, dict) else {}) | spaces)}")

    def value(self, schema: Any, end: str, as_text: bool = False) -> tuple[bool, str]:
        """A parameter's value and the text after it: whether it is text as it stands, not JSON, and its grammar.
        ``as_text``: strings never stand in quotes, so if only length or pattern is said, any text will do."""
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
        if allowed and all(isinstance(one, str) and one for one in allowed):
            return True, f"({' | '.join(map(self.literal, allowed))}) {self.literal(end)}"
        plain = isinstance(schema, dict) and schema.get("type") == "string" and not {"enum", *_SHAPES} & schema.keys()
        if plain or as_text:
            return True, self.until(end)
        return False, f"{self.json(schema)} {self.literal(end)}"

    def source(self, body: str, *others: Any) -> str:
        """The grammar of ``body``, see :func:`.lark_grammar`."""
        return lark_grammar("\n".join([f"start: {body}", *self._rules]), *others)


class Function(NamedTuple):
    """A tool, as a call of it is written."""

    name: str
    parameters: dict[str, Any]  # a schema of an object

    @property
    def fields(self) -> Iterator[tuple[str, Any, bool]]:
        """Name and schema of each parameter, and whether it is required."""
        shared = {name: self.parameters[name] for name in ("$defs", "definitions") if name in self.parameters}
        required = self.parameters.get("required") or ()
        for name, schema in (self.parameters.get("properties") or {}).items():
            schema = resolved(schema, self.parameters)
            yield name, schema | shared if isinstance(schema, dict) else schema, name in required


def resolved(schema: Any, root: Any) -> Any:
    """A schema with that to which its ``$ref`` points in ``root``, and the only one of its ``allOf``, put in."""
    for _ in range(32):  # references to one another have no end
        if not isinstance(schema, Mapping):
            return schema
        given = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        pointer, every = schema.get("$ref"), schema.get("allOf")
        if isinstance(pointer, str) and pointer.startswith("#/"):
            target = root
            for part in pointer[2:].split("/"):
                target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                return schema
            schema = {**target, **given}
        elif isinstance(every, (list, tuple)) and len(every) == 1 and isinstance(every[0], Mapping):
            schema = {**every[0], **given}
        else:
            return schema
    return schema


def functions_of(tools: Sequence[Any]) -> list[Function]:
    """The functions of tools in OpenAI's form; raises ``ValueError`` if one has another form."""
    functions = []
    for tool in tools:
        about = tool.get("function") if isinstance(tool, Mapping) else None
        name = about.get("name") if isinstance(about, Mapping) else None
        parameters = (about.get("parameters") or {}) if isinstance(about, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(parameters, dict):
            form = "{'type': 'function', 'function': {'name': …, 'parameters': {…}}}"
            raise ValueError(f"a tool must be {form}, not {shown(tool)}")
        functions.append(Function(name, {"type": "object", "additionalProperties": False} | parameters))
    return functions


def after_thought(answer: str, writer: GrammarWriter, begin: str, end: str, is_open: bool) -> str:
    """The source of a grammar ``answer`` after a thought: one that ``is_open``, or one that may be opened."""
    thought = writer.rule(writer.until(end))
    first, *others = json.loads(answer)["grammars"]
    begins = thought if is_open else f"({writer.literal(begin)} {thought})?"
    return writer.source(f"{begins} @answer", first | {"name": "answer"}, *others)
