"""Plots with ``matplotlib`` (the extra ``plot``), which is imported when the first one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsa_engine.measure.report import logger
from dsa_engine.system.output_files import whole_file


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
    """Raises ``ValueError``, before anything is measured, if no plot can be drawn at ``path``; None: no plot."""
    if path is None:
        return
    load_pyplot()
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"cannot draw {path}: plots are PNG files; give a name that ends in .png")


def save(figure: Any, path: str) -> None:
    """Writes a figure as a PNG, whole or not at all, and closes it."""
    try:
        with whole_file(path) as file:
            figure.savefig(file, dpi=120)
        logger.info("the plot is in %s", path)
    finally:
        load_pyplot().close(figure)
