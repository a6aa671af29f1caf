"""The result of a check of ``dsa-engine doctor``, and how a check ends without one."""

from __future__ import annotations

from dataclasses import dataclass


class NotHere(Exception):
    """The check cannot be made on this machine; the text says why."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: ``ok`` is None if it could not be made here."""

    check: str
    ok: bool | None
    seen: str
    advice: str = ""
    seconds: float = 0.0


class Unwell(Exception):
    """A problem, and its remedy."""

    def __init__(self, seen: str, advice: str):
        super().__init__(seen)
        self.advice = advice
