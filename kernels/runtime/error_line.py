"""An error in one line, for tables, logs and files; compilers and devices write pages."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Of what it says; empty where it says nothing."""
    return (str(error).splitlines() or [""])[0]


def error_line(error: BaseException, most: int = 200) -> str:
    """Its type and the first line of what it says, of that at most ``most`` characters."""
    return f"{type(error).__name__}: {first_line(error)[:most]}"
