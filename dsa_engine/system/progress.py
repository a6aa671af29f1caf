"""Progress: a bar on a terminal or in a notebook, otherwise a line in the log every ten seconds."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm.auto import tqdm

_EVERY_S = 10.0

logger = logging.getLogger(__name__)


class LoggedProgress:
    """Replaces a ``tqdm`` bar if there is no terminal: the part of its interface that the engine uses."""

    def __init__(self, total: int, unit: str, title: str):
        self.n = 0
        self._total, self._unit, self._title = total, unit, title
        self._postfix = ""
        self._begin = self._last_line = time.monotonic()

    def update(self, n: int = 1) -> None:
        self.n += n
        now = time.monotonic()
        if now - self._last_line >= _EVERY_S:
            self._last_line = now
            detail = f", {self._postfix}" if self._postfix else ""
            counted = f"{self.n:,} of {self._total:,} {self._unit}"
            logger.info("%s: %s in %.0f s%s", self._title, counted, now - self._begin, detail)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._postfix = text

    def __enter__(self) -> LoggedProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def progress_bar(total: int, unit: str, title: str, shown: bool = True) -> Any:
    """A context manager with ``update(n)``, ``set_postfix_str(text)`` and ``n``, as those of ``tqdm``.

    Args:
        total: the number of units.
        unit: their name, in the plural.
        title: what is being done.
        shown: False shows nothing.
    """
    if not shown or sys.stderr is None:
        return tqdm(total=total, disable=True)
    if sys.stderr.isatty() or _in_notebook():
        return tqdm(total=total, unit=unit, desc=title, leave=False, dynamic_ncols=True)
    return LoggedProgress(total, unit, title)


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel, whose stderr is not a terminal but shows bars."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and "IPKernelApp" in (getattr(ipython.get_ipython(), "config", None) or {})
