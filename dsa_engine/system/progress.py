"""Progress of what takes over 3 seconds: a bar on a terminal or in a notebook, otherwise lines in the log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm.auto import tqdm

_FIRST_S, _EVERY_S = 3.0, 10.0  # until the first line, and from then on
_LINE = "{desc}: {n_fmt} of {total_fmt}{unit} in {elapsed}, {rate_noinv_fmt}, {remaining} to go{postfix}"
_LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} in {elapsed}{postfix}"

logger = logging.getLogger(__name__)


def progress_bar(total: int | None, unit: str, title: str, shown: bool = True) -> Any:
    """A bar of ``tqdm`` over ``total`` units (None: not known), whose name is a plural; "B": bytes."""
    scaled = unit == "B"
    bar: dict[str, Any] = {"total": total, "unit_scale": scaled, "desc": title, "leave": False, "delay": _FIRST_S}
    if not shown or sys.stderr is None:
        return tqdm(disable=True, unit=unit, **bar)
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return tqdm(dynamic_ncols=True, unit=unit, **bar)
    line = _LINE_WITHOUT_TOTAL if total is None else _LINE
    unit = unit if scaled else f" {unit}"
    return tqdm(file=_Log(), bar_format=line, mininterval=_FIRST_S, unit=unit, **bar)


class _Log:
    """The file of a bar: its texts become lines of the log, at most one every ten seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def write(self, text: str) -> None:
        line, now = text.strip(), time.monotonic()
        if line and now >= self._next:
            self._next = now + _EVERY_S
            logger.info("%s", line)

    def flush(self) -> None:
        pass
