"""Checks of single values, for options, sampling parameters and configuration files alike.

A check is called with a name and a value, and raises ``ValueError`` where the value is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[str, Any], None]


def is_integer(value: Any) -> bool:
    """Whether it is an integer; True and False are none here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold: no True or False, no nan, nothing infinite."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def shown(value: Any) -> str:
    """A value for an error: at most 80 characters of it."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        text = f"a {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def integer(least: int | None = None, most: int | None = None) -> Check:
    """Allows integers ``least … most``."""
    wanted = "a positive integer" if (least, most) == (1, None) else f"an integer{_range(least, most)}"

    def check(name: str, value: Any) -> None:
        if not is_integer(value) or not _within(value, least, most):
            raise ValueError(f"{name} must be {wanted}, not {shown(value)}")

    return check


def number(least: float | None = None, most: float | None = None, above: float | None = None, what: str = "") -> Check:
    """Allows finite numbers from ``least``, or ``above`` a bound, up to ``most``; ``what`` says more of them."""
    wanted = f"a finite number{_range(least, most, above)}{what}"

    def check(name: str, value: Any) -> None:
        if not is_number(value) or not _within(value, least, most) or (above is not None and value <= above):
            raise ValueError(f"{name} must be {wanted}, not {shown(value)}")

    return check


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _range(least: float | None, most: float | None, above: float | None = None) -> str:
    """Bounds in words, behind "a number"."""
    if least is not None:
        return f" of at least {least:g}" if most is None else f" from {least} to {most}"
    low = "" if above is None else f" above {above:g}"
    return low if most is None else f"{low}{' and' if low else ''} of at most {most:g}"


def flag(name: str, value: Any) -> None:
    """Allows True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def or_none(check: Check) -> Check:
    """Allows None, and what ``check`` allows."""

    def checked(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return checked


def list_of(check: Check, what: str) -> Check:
    """Allows lists and tuples of what ``check`` allows; ``what`` says what that is."""

    def checked(name: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list of {what}, not {shown(value)}")
        for one in value:
            try:
                check(name, one)
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a list of {what}; {shown(one)} is none") from None

    return checked
