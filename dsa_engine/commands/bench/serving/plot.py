"""The plot of a serving benchmark: the times to the first token, by hit and miss."""

from __future__ import annotations

from typing import Any

from dsa_engine.commands.bench.serving.result import ServingResult, compared
from dsa_engine.measure.plots import load_pyplot, save


def plot_serving(result: ServingResult, without: ServingResult | None, path: str, title: str = "") -> None:
    """Draws the fraction of requests whose first token came within a time, a curve for each kind of request.

    Args:
        without: the same traffic without hits of the prefix cache.
        path: name of the PNG.
        title: printed above: what was measured, where and when.
    """
    pyplot = load_pyplot()
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(figsize=(7, 4.6), layout="constrained")
    if title:
        axes.set_title(title, fontsize="medium")
    for label, requests, style in (
        ("all", result.done, "-"),
        ("hits", result.hits(), "-"),
        ("misses", result.hits(False) if result.hits() else [], "-"),
        ("all, without hits", without.done if without else [], "--"),
    ):
        if requests:
            _curve(axes, sorted(r["ttft"] * 1e3 for r in requests), f"{label} ({len(requests):,})", style)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("{x:,g}")
    axes.set_xlabel("TTFT, ms")
    axes.set_ylabel("requests, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path, compared(result, without))


def _curve(axes: Any, ms: list[float], label: str, style: str) -> None:
    percent = [100 * (number + 1) / len(ms) for number in range(len(ms))]
    axes.step([ms[0], *ms], [0.0, *percent], style, where="post", label=label)
