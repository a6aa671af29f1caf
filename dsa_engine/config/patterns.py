"""Regular expressions of a ``config.json``, matched under a time limit: one that backtracks could take hours."""

from __future__ import annotations

import re
import time
from functools import cache
from typing import Any

import regex  # type: ignore[import-untyped]  # a part of transformers; unlike Python's it can stop

from dsa_engine.config.checks import shown

TIME_LIMIT = 10.0  # seconds for all names that an expression is compared with; a name takes microseconds
_COUNTED = 1e-3  # seconds from which on a name counts
MAX_REPETITIONS = 1000  # product of the counts of an expression, as in a{10}: they take memory when it is compiled
_COUNTS = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_MAX_QUICK = 3  # repetitions, not within each other, that need no limit for names of some 80 characters


class _Pattern:
    """A compiled expression, and the seconds that it has taken for names that took long."""

    def __init__(self, expression: str):
        self.seconds = 0.0
        # A limit makes a comparison ten times as long.
        repeats_group = re.search(r"\)[*+?{]", expression) is not None
        self.limited = repeats_group or len(re.findall(r"[*+{]", expression)) > _MAX_QUICK
        self.compiled: Any = (regex if self.limited else re).compile(expression)


_pattern = cache(_Pattern)


def check_pattern(key: str, entry: str) -> None:
    """Raises ``ValueError``, with the name of its key, for an ``entry`` "re:…" that is no regular expression."""
    repetitions = 1
    for low, high in _COUNTS.findall(entry):
        repetitions = min(repetitions * max(1, int((high or low or "1")[:9])), MAX_REPETITIONS + 1)
    if repetitions > MAX_REPETITIONS:
        raise ValueError(f"{key}: {shown(entry)} repeats more than {MAX_REPETITIONS} times; write it with * or +")
    try:
        re.compile(entry[3:])
        _pattern(entry[3:])
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{key}: {shown(entry)} is no regular expression: {reason}") from error


def matches(key: str, expression: str, name: str) -> bool:
    """Whether the beginning of ``name`` matches.

    Raises:
        ValueError: the expression has taken longer than ``TIME_LIMIT``; the text has its key.
    """
    pattern = _pattern(expression)
    if not pattern.limited:
        return pattern.compiled.match(name) is not None
    start = time.perf_counter()
    try:
        matched = pattern.compiled.match(name, timeout=max(1e-3, TIME_LIMIT - pattern.seconds)) is not None
    except TimeoutError:
        raise ValueError(
            f"{key}: the regular expression {shown('re:' + expression)} takes longer than {TIME_LIMIT:g} seconds; "
            "write it without repetitions of repetitions"
        ) from None
    taken = time.perf_counter() - start
    if taken > _COUNTED:
        pattern.seconds += taken
    return matched
