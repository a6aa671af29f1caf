"""The sandbox of chat templates: ``jinja2``'s, in which no value grows beyond a limit.

A template is an untrusted program, and a single operation can take all memory: ``'x' * 10000000000``, or ``v + v`` in a
loop. Each operation that makes a long value of short ones is therefore bounded before it runs, and each result is
counted. What a template finds here, besides the sandbox, is what templates on the Hub rely on: ``tojson``,
``raise_exception``, ``strftime_now``, ``namespace``, ``break``, ``continue`` and ``generation`` blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
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

VALUE = 2**22  # characters and elements of one value, or _FACTOR times what the template is given, if that is more
_FACTOR = 16
_ALL = 128  # all values of one rendering together may have this many times as many
_DIGITS = 4096  # binary digits of an integer
_SEQUENCES = (str, bytes, list, tuple)
_LARGE_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})|\{[^{}]*[:.][^{}]*(?:\{|\d{5})")  # in a text for % or format()


class TooLong(ValueError):
    """A template would make a value that is too long."""


class _Budget:
    """How much one rendering may still make."""

    def __init__(self, value: int):
        self.value, self.all = value, _ALL * value

    def check(self, size: int) -> None:
        """Raises :class:`TooLong` before a value of ``size`` characters or elements is made."""
        if size > self.value:
            raise TooLong(f"it makes a value of more than {self.value:,} characters")

    def count(self, size: int) -> None:
        """Counts a value that was made."""
        self.check(size)
        self.all -= size
        if self.all < 0:
            raise TooLong(f"it makes values of more than {_ALL * self.value:,} characters in all")


_budget: ContextVar[_Budget] = ContextVar("budget")  # belongs to the rendering in this thread


def render_bounded(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes.

    Raises:
        TooLong: a value in it would be too long.
        Exception: whatever a template can raise.
    """
    given = _size(dict(variables), 2**62) + len(source)
    with _new_budget(max(VALUE, _FACTOR * given)):
        return _compiled(source).render(**variables)


@contextmanager
def _new_budget(value: int) -> Iterator[None]:
    token = _budget.set(_Budget(value))
    try:
        yield
    finally:
        _budget.reset(token)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    return _Sandbox().from_string(source)


def _size(value: Any, enough: int) -> int:
    """About the characters and elements of a value as it would be printed, all that it contains included.

    A list that is contained twice counts twice. Counting ends above ``enough``.
    """
    size = 0
    remaining: list[Iterable[Any]] = [[value]]
    while remaining:
        for one in remaining.pop():
            parts: Any = one
            if isinstance(one, dict):
                parts = [*one, *one.values()]
            elif isinstance(one, Namespace):
                parts = [one._Namespace__attrs]
            if isinstance(parts, (str, bytes, list, tuple, set)):
                size += len(parts)
                if size > enough:
                    return size
                if not isinstance(parts, (str, bytes)):
                    remaining.append(parts)
    return size


def _check(*values: Any, times: int = 1, more: int = 0) -> None:
    """Raises :class:`TooLong` if these values, together and so many times, are too long."""
    budget = _budget.get()
    budget.check(more + times * sum(_size(value, budget.value) for value in values))


def _counted(value: Any) -> Any:
    """A result, which is counted."""
    if isinstance(value, _SEQUENCES):
        _budget.get().count(len(value))
    return value


def _check_operator(operator: str, first: Any, second: Any) -> None:
    integers = isinstance(first, int) and isinstance(second, int)
    if operator == "%":
        if isinstance(first, str):
            _check_format(first, second)
    elif integers and operator != "+":
        digits = first.bit_length() * second if operator == "**" else first.bit_length() + second.bit_length()
        if digits > _DIGITS:
            raise TooLong(f"it makes an integer of more than {_DIGITS:,} binary digits")
    elif operator == "*":
        for value, count in ((first, second), (second, first)):
            if isinstance(count, int) and isinstance(value, _SEQUENCES):
                _budget.get().check(len(value) * count)
    elif isinstance(first, _SEQUENCES) and isinstance(second, _SEQUENCES):
        _budget.get().check(len(first) + len(second))


def _check_format(pattern: str, *values: Any) -> None:
    if _LARGE_WIDTH.search(pattern):
        raise TooLong("it formats with a width of more than four digits, or one that is a variable")
    _check(*values, times=1 + pattern.count("%") + pattern.count("{"), more=len(pattern))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    text, old = str(text), str(old)
    _check(text, more=text.count(old) * len(str(new)))


def _check_pad(value: Any, width: Any = 80, *_: Any) -> None:
    _check(value, more=width if isinstance(width, int) else 0)


def _check_lines(text: Any, width: Any = 4, *_: Any) -> None:
    """For ``indent`` and ``expandtabs``, which may insert ``width`` characters, or a text, at each character."""
    inserted = width if isinstance(width, int) else len(str(width))
    _check(text, more=(1 + str(text).count("\n") + str(text).count("\t")) * max(0, inserted))


def _check_join(pieces: Any, separator: Any = "", *_: Any) -> None:
    _check(pieces, more=len(pieces) * len(str(separator)) if isinstance(pieces, (list, tuple, str)) else 0)


def _check_round(_: Any, precision: Any = 0, *__: Any) -> None:
    _check_operator("**", 10, precision)


def _check_json(value: Any, *form: Any) -> None:
    """``form``: indent and separators, which may be numbers or texts."""
    _check(value, times=2 + sum(one if isinstance(one, int) else _size(one, VALUE) for one in form if one))


# Filters of jinja2 and methods of texts that can make a long text of short ones; a method's first argument is its text.
_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_pad,
    "ljust": _check_pad,
    "rjust": _check_pad,
    "zfill": _check_pad,
    "batch": lambda value, count=0, *_: _check_pad("", count),
    "slice": lambda value, count=0, *_: _check_pad("", count),
    "indent": _check_lines,
    "expandtabs": lambda text, width=8: _check_lines(text, width),
    "replace": _check_replace,
    "translate": lambda text, table=(): _check(text, more=len(text) * _size(table, VALUE)),
    "join": _check_join,
    "format_map": lambda pattern, values=(): _check_format(str(pattern), values),
    "wordwrap": lambda text, width=79, whole=True, line="\n", *_: _check(text, more=len(str(text)) * len(str(line))),
    "round": _check_round,
    "tojson": _check_json,
}
# Other filters write their value as a text; these do not, and may be called often with all messages.
_OF_ELEMENTS = {"attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"}
_OF_ELEMENTS |= {"map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "sort"}
_OF_ELEMENTS |= {"unique"}
# Arguments by name, in the order of the checks' parameters.
_NAMES = {
    "indent": ("width",),
    "tojson": ("ensure_ascii", "indent", "separators"),
    "round": ("precision",),
    "wordwrap": ("width", "_", "wrapstring"),
}
_NAMES |= {"center": ("width",), "batch": ("linecount",), "slice": ("slices",), "expandtabs": ("tabsize",)}
_NAMES |= {"replace": ("old", "new"), "join": ("d",)}


def _check_call(name: str, value: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Checks a call of a filter or of a text's method; names of arguments are those of jinja2's filters."""
    if name in _OF_ELEMENTS:
        return
    _check(value, *args, *named.values())  # so that each can be written as a text
    if name == "format":
        _check_format(str(value), args, named)
    elif name in _CHECKS:
        by_name = [named[one] for one in _NAMES.get(name, ())[len(args) :] if one in named]
        _CHECKS[name](value, *args, *by_name)


def _bounded_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    passed = int(hasattr(run, "jinja_pass_arg"))  # the first argument may be the context or the environment

    @wraps(run)
    def bounded(*args: Any, **named: Any) -> Any:
        value = args[passed]
        if isinstance(value, Iterator):
            value = [*_until_full(value)]
        _check_call(name, value, args[passed + 1 :], named)
        return _counted(run(*args[:passed], value, *args[passed + 1 :], **named))

    return bounded


def _until_full(values: Iterable[Any]) -> Iterator[Any]:
    """Values that come one by one, until they are too long together."""
    budget, size = _budget.get(), 0
    for value in values:
        size += 1 + _size(value, budget.value)
        budget.check(size)
        yield value


def _concatenated(pieces: Iterable[str]) -> str:
    return str(_counted("".join(_until_full(pieces))))


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
        _check_operator(operator, first, second)
        return _counted(super().call_binop(context, operator, first, second))

    def joined(self, values: tuple[Any, ...]) -> str:
        _check(*values)
        return str(_counted(str_join(values)))

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, (str, bytes)):
            name = __obj.__name__
            if name == "join":
                args = tuple([*_until_full(pieces)] for pieces in args)
                _check_join(*args, text)
            else:
                _check_call(name, text, args, named)
        return _counted(super().call(__context, __obj, *args, **named))


def _finalized(value: Any) -> Any:
    _check(value)
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
