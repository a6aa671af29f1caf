"""Plots of measured results; ``matplotlib`` (the extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsa_engine.output_files import whole_file


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, set up to draw to files; ``ValueError`` where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install 'dsa-engine[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot(path: str | None) -> None:
    """Says before anything is measured that a plot cannot be drawn; None is no plot.

    Raises:
        ValueError: matplotlib is not installed, or the name is not that of a PNG.
    """
    if path is None:
        return
    load_pyplot()
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"cannot draw {path}: plots are PNG files; give a name that ends in .png")


def save(figure: Any, path: str, dpi: int = 120) -> None:
    """Writes a figure as a PNG, whole or not at all, and closes it."""
    try:
        with whole_file(path) as file:
            figure.savefig(file, dpi=dpi)
    finally:
        load_pyplot().close(figure)


def plot_prefill(results: list[dict[str, Any]], path: str, title: str = "") -> None:
    """TTFT against length, and the stages of each length as a stacked bar (mean over ranks).

    Args:
        results: of :meth:`dsa_engine.measure.prefill_benchmark.PrefillResult.to_json`.
        path: of the PNG.
        title: stands above both, such as what is emulated.
    """
    rows = [r | {"batch_size": 1} for r in results]
    bars = [(f"{r['input_len']:,}", r["stage_ms"]) for r in results]
    _plot(rows, "ttft", bars, "Stages (mean over ranks)", path, title)


def plot_latency(results: list[dict[str, Any]], metric: str, path: str, title: str = "") -> None:
    """``metric`` ("ttft" or "tpot") against the prompt's length, and the stages of that phase as a stacked bar.

    Args:
        results: of :meth:`dsa_engine.measure.generation_benchmark.LatencyResult.to_json`.
        path: of the PNG.
        title: stands above both, such as what is emulated.
    """
    phase = "prefill" if metric == "ttft" else "decode"
    bars = [
        (f"{r['input_len']:,}\n× {r['batch_size']}", r["stage_ms"][phase]) for r in results if phase in r["stage_ms"]
    ]
    what = "until all have a first token" if metric == "ttft" else "per output token"
    _plot(results, metric, bars, f"Stages, {what} (mean over ranks)", path, title)


def _plot(
    results: list[dict[str, Any]],
    metric: str,
    bars: list[tuple[str, list[dict[str, float]]]],
    bars_title: str,
    path: str,
    title: str,
) -> None:
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.4), layout="constrained")
    if title:
        figure.suptitle(title, fontsize="medium")
    for batch in sorted({r["batch_size"] for r in results}):
        _lines(left, [r for r in results if r["batch_size"] == batch], metric, batch)
    left.set(xlabel="prompt tokens" if metric == "ttft" else "context, tokens", ylabel=f"{metric.upper()}, ms")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend(fontsize="small")
    floor = [0.0] * len(bars)
    names = list(dict.fromkeys(name for _, ranks in bars for name in ranks[0]))
    for i, name in enumerate(names):
        ms = [sum(rank[name] for rank in ranks) / len(ranks) for _, ranks in bars]
        if any(ms):
            right.bar([label for label, _ in bars], ms, bottom=floor, label=name, color=pyplot.cm.tab20(i % 20))
            floor = [low + m for low, m in zip(floor, ms, strict=True)]
    right.set(xlabel="tokens", ylabel="ms", title=bars_title)
    if any(floor):
        right.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def _lines(axes: Any, rows: list[dict[str, Any]], metric: str, batch: int) -> None:
    """One batch size: median and 99th percentile or, of an emulated rank, what is measured and what is modelled."""
    tokens = [r["input_len"] for r in rows]
    if f"{metric}_ms" not in rows[0]:
        (line,) = axes.plot(
            tokens, [r[f"median_{metric}_ms"] for r in rows], marker="o", label=f"batch {batch}, median"
        )
        axes.plot(tokens, [r[f"p99_{metric}_ms"] for r in rows], "--", color=line.get_color(), label="99th percentile")
        return
    color = None
    for key, style, label in (
        ("computed", "-", f"batch {batch}, computed (measured)"),
        ("overlapped", "--", "with communication (modelled), overlapped"),
        ("not_overlapped", ":", "with communication (modelled), not overlapped"),
    ):
        (line,) = axes.plot(tokens, [r[f"{metric}_ms"][key] for r in rows], style, marker="o", color=color, label=label)
        color = line.get_color()
