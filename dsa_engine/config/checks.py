"""Checks of values by their annotated types, and texts of values for errors.

A type may carry rules: ``Annotated[int, at_least(1)]``. Options, sampling parameters and requests are checked so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

DTYPE_NAMES = ("float32", "bfloat16", "float16")  # weights and activations


class Rule(NamedTuple):
    """A rule for a value besides its type. ``text`` follows the words of the type in an error."""

    text: str
    holds: Callable[[Any], bool]


@functools.cache
def at_least(low: float, high: float = math.inf) -> Rule:
    """``low`` or more, and at most ``high``."""
    text = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
    return Rule(text, lambda value: low <= value <= high)


@functools.cache
def above(low: float, high: float = math.inf) -> Rule:
    """More than ``low``, and at most ``high``."""
    text = f"above {low}" if high == math.inf else f"above {low} and at most {high}"
    return Rule(text, lambda value: low < value <= high)


NOT_EMPTY = Rule("that is not empty", lambda value: len(value) > 0)

PositiveInt = Annotated[int, at_least(1)]
Fraction = Annotated[float, above(0, 1)]
Seconds = Annotated[float, above(0)]
Seed = Annotated[int, at_least(-(2**63), 2**64 - 1)]  # the range of PyTorch's generators
TokenId = Annotated[int, at_least(0, 2**31 - 1)]


def check(name: str, value: Any, hint: Any) -> None:
    """Raises ``ValueError`` if a value is not of the type ``hint``, or breaks a rule of it."""
    if not _test(hint)(value):
        raise ValueError(f"{name} must be {_words(hint)}, not {shown(value)}")


@functools.cache
def _test(hint: Any) -> Callable[[Any], bool]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        has_type, rules = _test(args[0]), args[1:]
        return lambda value: has_type(value) and all(rule.holds(value) for rule in rules)
    if origin in (Union, UnionType):
        tests = [_test(one) for one in args]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: value in args
    if origin in (list, tuple):
        item = _test(args[0])
        return lambda value: isinstance(value, (list, tuple)) and all(map(item, value))
    if origin is dict:
        key, item = map(_test, args)
        return lambda value: isinstance(value, dict) and all(key(k) and item(v) for k, v in value.items())
    if hint is Any:
        return lambda value: True
    return {int: is_integer, float: is_number}.get(hint, lambda value: isinstance(value, hint))


_WORDS = {int: "an integer", float: "a finite number", bool: "True or False", str: "a text"}


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([_words(args[0]), *(rule.text for rule in args[1:])])
    if origin in (Union, UnionType):
        return " or ".join(_words(one) for one in args if one is not NoneType)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin in (list, tuple):
        return "a list" if args[0] is Any else f"a list (each {_words(args[0])})"
    if origin is dict:
        return "a dictionary" if args[1] is Any else f"a dictionary from {_words(args[0])} to {_words(args[1])}"
    return _WORDS.get(hint) or f"a {hint.__name__}"


def is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer; True and False do not count as integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number that a float can hold; True and False do not count as numbers."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def shown(value: Any) -> str:
    """The text of a value for an error message, at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        text = f"a {type(value).__name__} with a number of thousands of digits"
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def check_text(name: str, value: str) -> None:
    """Raises ``ValueError`` for a text that UTF-8 cannot write."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair, which is no character, at index {error.start} "
            f"({value[error.start]!a}); decode its bytes as they were encoded, or with errors='replace'"
        ) from None
