"""Checks of single values, for options, sampling parameters and configuration files.

A check is called with a name and a value, and raises ``ValueError`` where the value is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[str, Any], None]

DTYPE_NAMES = ("float32", "bfloat16", "float16")  # weights and activations


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
    """Allows texts of whole characters, as UTF-8 can write them."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair, which is no character, at index {error.start} "
            f"({value[error.start]!a}); decode its bytes as they were encoded, or with errors='replace'"
        ) from None


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """Allows integers ``minimum … maximum``."""
    wanted = "a positive integer" if (minimum, maximum) == (1, None) else f"an integer{_range(minimum, maximum)}"

    def check(name: str, value: Any) -> None:
        if not is_integer(value) or not _within(value, minimum, maximum):
            raise ValueError(f"{name} must be {wanted}, not {shown(value)}")

    return check


def number(
    minimum: float | None = None, maximum: float | None = None, above: float | None = None, what: str = ""
) -> Check:
    """Allows finite numbers from ``minimum``, or ``above`` a bound, up to ``maximum``; messages end in ``what``."""
    wanted = f"a finite number{_range(minimum, maximum, above)}{what}"

    def check(name: str, value: Any) -> None:
        if not is_number(value) or not _within(value, minimum, maximum) or (above is not None and value <= above):
            raise ValueError(f"{name} must be {wanted}, not {shown(value)}")

    return check


def _within(value: float, minimum: float | None, maximum: float | None) -> bool:
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _range(minimum: float | None, maximum: float | None, above: float | None = None) -> str:
    """The bounds in words, to follow "a number"."""
    if minimum is not None:
        return f" of at least {minimum:g}" if maximum is None else f" from {minimum} to {maximum}"
    low = "" if above is None else f" above {above:g}"
    return low if maximum is None else f"{low}{' and' if low else ''} of at most {maximum:g}"


def flag(name: str, value: Any) -> None:
    """Allows True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def or_none(check: Check) -> Check:
    """Allows None and what ``check`` allows."""

    def checked(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return checked


def list_of(check: Check, what: str) -> Check:
    """Allows lists and tuples of what ``check`` allows; ``what`` names it in messages."""

    def checked(name: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list of {what}, not {shown(value)}")
        for one in value:
            try:
                check(name, one)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a list of {what}; {shown(one)} is none") from None

    return checked
