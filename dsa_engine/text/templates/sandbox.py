"""The sandbox of chat templates: ``jinja2``'s, in which no value grows beyond a limit.

A template is an untrusted program, and a single operation can take all memory: ``'x' * 10000000000``, or ``v + v`` in a
loop. So ``limits.py`` checks each operation before it runs, and counts each result. Besides the sandbox, a
template finds here what templates on the Hub rely on: ``tojson``, ``raise_exception``, ``strftime_now``, ``namespace``,
``break``, ``continue`` and ``generation`` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dsa_engine.text.templates.limits import (
    check_all,
    check_call,
    check_join,
    check_operator,
    counted,
    rendering,
    size_of,
    until_full,
)


def render_bounded(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes.

    Raises:
        TooLong: a value in it would be too long.
        Exception: whatever a template can raise.
    """
    given = size_of(dict(variables), 2**62) + len(source)
    with rendering(given):
        return _compiled(source).render(**variables)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    return _Sandbox().from_string(source)


def _bounded_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    passed = int(hasattr(run, "jinja_pass_arg"))  # the first argument may be the context or the environment

    @wraps(run)
    def bounded(*args: Any, **named: Any) -> Any:
        value = args[passed]
        if isinstance(value, Iterator):
            value = [*until_full(value)]
        check_call(name, value, args[passed + 1 :], named)
        return counted(run(*args[:passed], value, *args[passed + 1 :], **named))

    return bounded


def _concatenated(pieces: Iterable[str]) -> str:
    return str(counted("".join(until_full(pieces))))


class _Generator(CodeGenerator):
    """Compiles ``a ~ b`` to a call of the environment, as its operators are."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """``{% generation %}`` blocks, which mark the assistant's text for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Names(Namespace):
    """``namespace()``, without names that lead into Python."""

    def __init__(*args: Any, **named: Any):
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}: its names do not begin with an underscore")
        super().__setitem__(name, value)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "%", "**"))
    code_generator_class = _Generator
    concat = staticmethod(_concatenated)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension], finalize=_finalized
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, run) for name, run in self.filters.items()}
        self.globals |= {"raise_exception": _raise, "strftime_now": _now, "namespace": _Names}
        del self.globals["lipsum"]  # makes as much text as it is asked for

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        check_operator(operator, first, second)
        return counted(super().call_binop(context, operator, first, second))

    def joined(self, values: tuple[Any, ...]) -> str:
        check_all(*values)
        return str(counted(str_join(values)))

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, (str, bytes)):
            name = __obj.__name__
            if name == "join":
                args = tuple(one if isinstance(one, (str, list, tuple)) else [*until_full(one)] for one in args)
                check_join(*args, text)
            else:
                check_call(name, text, args, named)
        return counted(super().call(__context, __obj, *args, **named))


def _finalized(value: Any) -> Any:
    check_all(value)
    return value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML that jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
