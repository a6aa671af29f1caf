"""The form that an output must have, as a grammar that the package llguidance reads.

The grammar is checked where a request is made; ``engine/sampling/grammar.py`` makes masks of tokens from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from dsa_engine.config.checks import NOT_EMPTY, check_text, shown
from dsa_engine.config.fields import Options, documented, option
from dsa_engine.config.grammar_check import GrammarCheck

MAX_CHARACTERS = 2**17  # a grammar of so many takes up to a quarter of a second to read
# At each place: a weak model may write nothing else, up to its last token, where it may go on with blank lines.
WHITE_SPACE = r"[ \t]{1,8}|\r?\n[ \t]{0,16}"
_MADE = '{"grammars"'  # a grammar in the library's own form
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_check = GrammarCheck()

Text = Annotated[str, NOT_EMPTY]


@documented
@dataclass
class StructuredOutputsParams(Options):
    """The form of an output: exactly one of these, and how JSON is written. Names and meanings are vLLM's."""

    json: dict[str, Any] | Text | None = option(None, "JSON of this JSON schema, a dictionary or its text.")
    regex: Text | None = option(None, "a text that this regular expression matches from begin to end.")
    choice: Annotated[list[Text], NOT_EMPTY] | None = option(None, "one of these texts.")
    grammar: Text | None = option(None, "a text of this context-free grammar, in Lark's syntax or GBNF.")
    json_object: bool = option(False, "any JSON object.")
    disable_any_whitespace: bool = option(False, "JSON has no white space between its parts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs takes one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}"
            )

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams | None:
        """The parameters that are given as such or as a dictionary; None for None and an empty dictionary."""
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise ValueError(f"structured_outputs must be StructuredOutputsParams or a dictionary, not {shown(given)}")
        try:
            return cls(**given) if given else None
        except TypeError as error:
            raise TypeError(f"structured_outputs has a field that is not possible: {error}") from None

    def source(self) -> str:
        """The grammar as llguidance reads it: JSON with a list of grammars, the first of which is the output's."""
        kind = next(name for name in _KINDS if getattr(self, name) not in (None, False))
        value = {"type": "object"} if self.json_object else getattr(self, kind)
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{kind} in structured_outputs cannot be written as JSON: {error}") from None
        check_text(f"{kind} in structured_outputs", text)
        limit = MAX_CHARACTERS * (4 if text.startswith(_MADE) else 1)  # made of one that was checked
        if len(text) > limit:
            raise ValueError(f"{kind} in structured_outputs has {len(text)} characters, of at most {limit}")
        try:
            return checked_grammar("json" if kind == "json_object" else kind, text, self.disable_any_whitespace)
        except ValueError as error:
            raise ValueError(f"{kind} in structured_outputs is not possible: {error}") from None


@lru_cache(256)
def checked_grammar(kind: str, text: str, compact: bool = False) -> str:
    """:meth:`StructuredOutputsParams.source` of one kind; what is not a text is given as JSON."""
    from llguidance import LLMatcher  # when it is first needed
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if kind == "json":
        spaces = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITE_SPACE}
        source = LLMatcher.grammar_from_json_schema(text, defaults=spaces)
    elif kind == "regex":
        source = LLMatcher.grammar_from_regex(text)
    elif kind == "choice":
        options = "|".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        source = lark_grammar(f"start: CHOICE\nCHOICE: {options}")
    elif text.startswith(_MADE):
        source = text
    else:
        try:
            source = lark_grammar(any_to_lark(text))
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        except GbnfToLarkError as error:
            raise ValueError(f"{error}; Lark's syntax has a rule start: …, and GBNF a rule root ::= …") from None
    if refusal := _check.refusal(source):
        raise ValueError(" ".join(refusal.split())[:400])
    return source


def lark_grammar(text: str, *others: Any) -> str:
    """The source of a grammar in Lark's syntax, which may refer to those of ``others``, each a dictionary."""
    return json.dumps({"grammars": [{"lark_grammar": text}, *others]}, ensure_ascii=False)
