"""Progress: a bar on a terminal or in a notebook, otherwise a line in the log every ten seconds."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm.auto import tqdm

_EVERY_S = 10.0
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit} in {elapsed}{postfix}"

logger = logging.getLogger(__name__)


def progress_bar(total: int, unit: str, title: str, shown: bool = True) -> Any:
    """A bar of ``tqdm``.

    Args:
        total: the number of units.
        unit: their name, in the plural.
        title: what is being done.
        shown: False shows nothing.
    """
    bar: dict[str, Any] = {"total": total, "unit": unit, "desc": title, "leave": False}
    if not shown or sys.stderr is None:
        return tqdm(disable=True, **bar)
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return tqdm(dynamic_ncols=True, **bar)
    return tqdm(file=_Log(), bar_format=_LINE, mininterval=_EVERY_S, delay=_EVERY_S, **bar)


class _Log:
    """The file of a bar: its texts become lines of the log."""

    def write(self, text: str) -> None:
        if line := text.strip():
            logger.info("%s", line)

    def flush(self) -> None:
        pass
