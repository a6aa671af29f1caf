"""Progress of what takes over 3 seconds: a bar on a terminal or in a notebook, otherwise lines in the log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm.auto import tqdm

_FIRST_S, _EVERY_S = 3.0, 10.0  # until the first line, and from then on
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_LINE = "{desc}: {n_fmt} of {total_fmt}{unit} in {elapsed}, {rate_noinv_fmt}, {remaining} to go{postfix}"
_LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} in {elapsed}{postfix}"

logger = logging.getLogger(__name__)


def progress_bar(total: int | None, unit: str, title: str, shown: bool = True) -> Any:
    """A bar of ``tqdm`` over ``total`` units (None: not known), whose name is a plural; "B": bytes."""
    scaled = unit == "B"
    bar: dict[str, Any] = {"total": total, "unit_scale": scaled, "desc": title, "leave": False, "delay": _FIRST_S}
    if not shown or sys.stderr is None:
        return tqdm(disable=True, unit=unit, **bar)
    kind, bar_format = (_Tokens, _BAR) if unit == "tokens" else (tqdm, None)
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return kind(dynamic_ncols=True, unit=unit, bar_format=bar_format, **bar)
    line = _LINE_WITHOUT_TOTAL if total is None else _LINE
    unit = unit if scaled else f" {unit}"
    return kind(file=_Log(), bar_format=line, mininterval=_FIRST_S, unit=unit, **bar)


class _Tokens(tqdm):
    """A bar of a prefill: a token attends to all before it, so n of them take a · n + b · n² seconds."""

    _seen: tuple[tuple[float, float], ...] = ()  # tokens, and the seconds that they took

    @property
    def format_dict(self) -> dict[str, Any]:
        """With the time to go by the curve through the last point and the one nearest to half of it."""
        shown = super().format_dict
        n, seconds, total = shown["n"], shown["elapsed"], shown["total"]
        if n > max(self._seen, default=(0,))[0]:
            self._seen = (*self._seen, (n, seconds))
        if self._seen:
            n, seconds = self._seen[-1]
            half, until_half = min(self._seen, key=lambda one: abs(one[0] - n / 2))
            b = max(0.0, (seconds / n - until_half / half) / max(1.0, n - half))
            text = self.format_interval((total - n) * (seconds / n + b * total))
            shown["remaining"] = text if half < n else f"over {text}"  # one point has no curve
        return shown


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
