"""JSON of a user's files and options, which may be nested too deeply for the code that walks it."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64  # objects and lists within each other; model configurations have about 5


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, or nested more than ``MAX_DEPTH`` deep.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raises ``ValueError`` for objects and lists that are nested more than ``MAX_DEPTH`` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list, tuple))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"objects and lists are nested more than {MAX_DEPTH} deep"
