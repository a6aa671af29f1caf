"""Plot of the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from context_parallel.many_ranks import Counted
from context_parallel.study import FORMS, FormResult
from dsa_engine.measure.plots import load_pyplot, save


def plot_forms(
    results: Sequence[FormResult], counted: Sequence[Counted], path: str, measured_title: str, counted_title: str
) -> None:
    """Left: measured time against length, a line for each form. Right: modelled time on many ranks over that of the
    first form, a group of bars for each length: work, and communication that no work overlaps."""
    pyplot = load_pyplot()
    figure, (measured_axes, counted_axes) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    colors = {name: f"C{number}" for number, name in enumerate(FORMS)}
    lengths = sorted({r.length for r in results})
    for name in dict.fromkeys(r.form for r in results):
        times = [statistics.median(r.seconds) * 1e3 for r in results if r.form == name]
        measured_axes.plot(lengths, times, marker="o", label=name, color=colors[name])
    measured_axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="one layer, ms")
    measured_axes.set_title(measured_title, fontsize="medium")
    measured_axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    measured_axes.grid(alpha=0.3)
    measured_axes.legend(fontsize="small")
    _bars(counted_axes, counted, colors)
    counted_axes.set_title(counted_title, fontsize="medium")
    save(figure, path)


def _bars(axes: Any, counted: Sequence[Counted], colors: dict[str, str]) -> None:
    lengths = sorted({c.length for c in counted})
    names = list(dict.fromkeys(c.form for c in counted))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        rows = [c for c in counted if c.form == name]
        first = [next(c for c in counted if c.length == row.length) for row in rows]
        at = [lengths.index(row.length) + (number - (len(names) - 1) / 2) * width for row in rows]
        work = [row.work_ms / base.total_ms for row, base in zip(rows, first, strict=True)]
        waits = [row.exposed_ms / base.total_ms for row, base in zip(rows, first, strict=True)]
        axes.bar(at, work, width * 0.9, color=colors[name], label=f"{name}: work")
        axes.bar(
            at, waits, width * 0.9, bottom=work, color=colors[name], alpha=0.4, hatch="//", label=f"{name}: waiting"
        )
        for x, row, base in zip(at, rows, first, strict=True):
            ratio = row.total_ms / base.total_ms
            axes.annotate(f"{ratio:.2f}", (x, ratio), ha="center", va="bottom", fontsize="x-small")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set(xlabel="tokens", ylabel=f"time over {names[0]}'s, ratio")
    axes.legend(fontsize="x-small", ncols=2)
