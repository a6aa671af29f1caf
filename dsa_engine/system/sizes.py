"""Sizes in bytes as text, such as "4GiB"."""

from __future__ import annotations

import re

from dsa_engine.config.checks import is_integer, shown

_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", start=1)}


def parse_bytes(value: int | str, what: str) -> int:
    """Bytes from a number or a size such as "5GB" (10^9), "512 MiB" (2^20) or "0.5GB"; ``what`` names it in errors.

    Raises:
        ValueError: not a positive size.
    """
    parsed = (
        0 if isinstance(value, str) or not is_integer(value) else value
    )  # a float is refused: 1.5 would be one byte
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        parsed = int(float(match[1]) * _UNITS.get(match[2].upper(), 0))
    if not 1 <= parsed < 2**63:
        raise ValueError(
            f"{what} must be a positive number of bytes or a size such as '4GiB' or '512MB', not {shown(value)}"
        )
    return parsed


def format_bytes(count: float) -> str:
    """The text of ``count`` bytes: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
