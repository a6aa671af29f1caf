"""An error in one line, for tables, logs and files; compilers and devices write pages."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty without one."""
    return (str(error).splitlines() or [""])[0]


def error_line(error: BaseException, max_length: int = 200) -> str:
    """Type of an error and the first ``max_length`` characters of its first line."""
    return f"{type(error).__name__}: {first_line(error)[:max_length]}"
