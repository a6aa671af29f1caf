"""The stage of a forward pass that runs now."""

from __future__ import annotations

from dsa_engine.measure.stage_timer import StageTimer
from dsa_engine.model import profile_stages


def current_stage() -> str:
    """ "other" between stages; "" if no :class:`StageTimer` is running."""
    timer = profile_stages._hook
    return timer.stage if isinstance(timer, StageTimer) else ""
