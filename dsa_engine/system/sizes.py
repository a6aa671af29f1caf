"""Sizes in bytes: as text, such as "4GiB", and of the host's memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from dsa_engine.config.checks import Rule, check

_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", start=1)}


def _bytes(value: int | str) -> int:
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    return int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0


_POSITIVE = Rule("that is a positive size, such as '4GiB' or '512MB'", lambda value: 1 <= _bytes(value) < 2**63)
Size = Annotated[int | str, _POSITIVE]


def parse_bytes(value: int | str, what: str) -> int:
    """Bytes from a number or a size such as "5GB" (10^9), "512 MiB" (2^20) or "0.5GB"; ``what`` names it in errors."""
    check(what, value, Size)
    return _bytes(value)


def format_bytes(count: float) -> str:
    """The text of ``count`` bytes: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def available_bytes() -> int:
    """Host memory available to new allocations."""
    info = Path("/proc/meminfo")
    if info.exists():
        return int(re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())[1]) * 1024  # type: ignore[index]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
