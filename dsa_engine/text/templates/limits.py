"""Limits on the values of a chat template: every operation is bounded before it makes a long value of short ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


@contextmanager
def rendering(given: int) -> Iterator[None]:
    """The rendering of a template that is given so many characters; all checks belong to one."""
    token = _budget.set(_Budget(max(VALUE, _FACTOR * given)))
    try:
        yield
    finally:
        _budget.reset(token)


def size_of(value: Any, enough: int) -> int:
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


def check_all(*values: Any, times: int = 1, more: int = 0) -> None:
    """Raises :class:`TooLong` if these values together, so many times, and ``more`` characters are too long."""
    budget = _budget.get()
    budget.check(more + times * sum(size_of(value, budget.value) for value in values))


def counted(value: Any) -> Any:
    """A result, which is counted."""
    if isinstance(value, _SEQUENCES):
        _budget.get().count(len(value))
    return value


def check_operator(operator: str, first: Any, second: Any) -> None:
    """Raises :class:`TooLong` before ``first operator second`` makes a value that is too long."""
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
    check_all(*values, times=1 + pattern.count("%") + pattern.count("{"), more=len(pattern))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    text, old = str(text), str(old)
    check_all(text, more=text.count(old) * len(str(new)))


def _check_pad(value: Any, width: Any = 80, *_: Any) -> None:
    check_all(value, more=width if isinstance(width, int) else 0)


def _check_lines(text: Any, width: Any = 4, *_: Any) -> None:
    """For ``indent`` and ``expandtabs``, which may insert ``width`` characters, or a text, at each character."""
    inserted = width if isinstance(width, int) else len(str(width))
    check_all(text, more=(1 + str(text).count("\n") + str(text).count("\t")) * max(0, inserted))


def check_join(pieces: Any, separator: Any = "", *_: Any) -> None:
    """Raises :class:`TooLong` before pieces are joined to a text that is too long."""
    check_all(pieces, more=len(pieces) * len(str(separator)) if isinstance(pieces, (list, tuple, str)) else 0)


def _check_round(_: Any, precision: Any = 0, *__: Any) -> None:
    check_operator("**", 10, precision)


def _check_json(value: Any, *form: Any) -> None:
    """``form``: indent and separators, which may be numbers or texts."""
    check_all(value, times=2 + sum(one if isinstance(one, int) else size_of(one, VALUE) for one in form if one))


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
    "translate": lambda text, table=(): check_all(text, more=len(text) * size_of(table, VALUE)),
    "join": check_join,
    "format_map": lambda pattern, values=(): _check_format(str(pattern), values),
    "wordwrap": lambda text, width=79, whole=True, line="\n", *_: check_all(text, more=len(str(text)) * len(str(line))),
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


def check_call(name: str, value: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Checks a call of a filter or of a text's method; names of arguments are those of jinja2's filters."""
    if name in _OF_ELEMENTS:
        return
    check_all(value, *args, *named.values())  # so that each can be written as a text
    if name == "format":
        _check_format(str(value), args, named)
    elif name in _CHECKS:
        by_name = [named[one] for one in _NAMES.get(name, ())[len(args) :] if one in named]
        _CHECKS[name](value, *args, *by_name)


def until_full(values: Iterable[Any]) -> Iterator[Any]:
    """Values that come one by one, until they are too long together."""
    budget, size = _budget.get(), 0
    for value in values:
        size += 1 + size_of(value, budget.value)
        budget.check(size)
        yield value
