"""Drawing of plots with ``matplotlib`` (the extra ``plot``), which is imported when the first one is drawn."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dsa_engine.system.output_files import whole_file

DRAWN = "Drawn data, SHA-256"  # the text of a PNG that holds the digest


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, set up to draw to files; ``ValueError`` if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install 'dsa-engine[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: str | None) -> None:
    """Checks before anything is measured that a plot can be drawn at ``path``; None: no plot.

    Raises:
        ValueError: matplotlib is not installed, or the name is not that of a PNG.
    """
    if path is None:
        return
    load_pyplot()
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"cannot draw {path}: plots are PNG files; give a name that ends in .png")


def save(figure: Any, path: str, data: Any, dpi: int = 120) -> None:
    """Writes a figure as a PNG, whole or not at all, and closes it.

    Args:
        data: the results that were drawn, as a report has them: the file holds their :func:`digest`.
    """
    try:
        with whole_file(path) as file:
            figure.savefig(file, dpi=dpi, metadata={DRAWN: digest(data)})
    finally:
        load_pyplot().close(figure)


def digest(data: Any) -> str:
    """Names results as JSON writes them."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def plain_log_ticks(axes: Any, lengths: list[int]) -> None:
    """Numbers in full on logarithmic axes: the lengths below, and 1, 2, 3 and 5 of each power of ten beside."""
    from matplotlib.ticker import LogLocator

    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("{x:,.0f}")
    axes.tick_params(axis="y", which="minor", labelsize="small")
