"""Plots of measured prefills and latencies."""

from __future__ import annotations

from typing import Any

from dsa_engine.measure.plots import load_pyplot, save

_STAGES_TITLE = "{}, mean over ranks\n(one run more; to watch it takes time, so the sum may exceed the left)"


def plot_prefill(results: list[dict[str, Any]], path: str, title: str = "") -> None:
    """TTFT against length, and the stages of each length as a stacked bar (mean over ranks).

    Args:
        results: see :meth:`dsa_engine.commands.bench.prefill_benchmark.PrefillResult.to_json`.
        path: name of the PNG.
        title: printed above both: what was measured, where and when.
    """
    rows = [r | {"batch_size": 1} for r in results]
    bars = [(f"{r['input_len']:,}", r["stage_ms"]) for r in results]
    _plot(rows, "ttft", bars, _STAGES_TITLE.format("Stages"), path, title)


def plot_latency(results: list[dict[str, Any]], metric: str, path: str, title: str = "") -> None:
    """``metric`` ("ttft" or "tpot") against the prompt's length, and the stages of that phase as a stacked bar.

    Args:
        results: see :meth:`dsa_engine.commands.bench.generation_benchmark.LatencyResult.to_json`.
        path: name of the PNG.
        title: printed above both: what was measured, where and when.
    """
    phase = "prefill" if metric == "ttft" else "decode"
    bars = [
        (f"{r['input_len']:,}\n× {r['batch_size']}", r["stage_ms"][phase]) for r in results if phase in r["stage_ms"]
    ]
    what = "until all have a first token" if metric == "ttft" else "per output token"
    stages = _STAGES_TITLE.format(f"Stages, {what}")
    _plot([r for r in results if _series(r, metric)], metric, bars, stages, path, title)


def _plot(
    results: list[dict[str, Any]],
    metric: str,
    bars: list[tuple[str, list[dict[str, float]]]],
    bars_title: str,
    path: str,
    title: str,
) -> None:
    pyplot = load_pyplot()
    figure, (curves, stacks) = pyplot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    if title:
        figure.suptitle(title, fontsize="medium")
    lengths = sorted({r["input_len"] for r in results})
    if len(lengths) > 1:
        _lines(curves, results, metric, lengths)
    elif results:
        _bars(curves, results, metric)
    curves.set_ylabel(f"{metric.upper()}, {_scale_axis(curves)}")
    curves.grid(alpha=0.3, axis="y")
    _stack(stacks, bars, pyplot.cm.tab20)
    stacks.set_xlabel("tokens × requests" if any("×" in label for label, _ in bars) else "tokens")
    stacks.set_title(bars_title, fontsize="medium")
    stacks.set_ylabel(_scale_axis(stacks))
    save(figure, path, results)


def _series(row: dict[str, Any], metric: str) -> list[tuple[str, str, float]]:
    """The values of one result: (label, line style, ms), the measured one first; empty if nothing was measured.

    For an emulated rank: the measured time, then that time with the modelled communication.
    """
    if f"{metric}_ms" in row:
        modelled = row[f"{metric}_ms"]
        return [
            ("computed (measured)", "-", modelled["computed"]),
            ("with communication (modelled), overlapped", "--", modelled["overlapped"]),
            ("with communication (modelled), not overlapped", ":", modelled["not_overlapped"]),
        ]
    if f"median_{metric}_ms" not in row:
        return []
    return [("median", "-", row[f"median_{metric}_ms"]), ("99th percentile", "--", row[f"p99_{metric}_ms"])]


def _lines(axes: Any, results: list[dict[str, Any]], metric: str, lengths: list[int]) -> None:
    """Draws a line for each batch size and series, against the length."""
    for batch in sorted({r["batch_size"] for r in results}):
        rows = [r for r in results if r["batch_size"] == batch]
        color = None
        for i, (label, style, _) in enumerate(_series(rows[0], metric)):
            points = [_series(r, metric)[i][2] for r in rows]
            (line,) = axes.plot(
                [r["input_len"] for r in rows], points, style, marker="o", color=color, label=f"batch {batch}, {label}"
            )
            color = line.get_color()
    if lengths[-1] >= 8 * lengths[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("prompt tokens" if metric == "ttft" else "context, tokens")
    axes.set_ylim(0, 1.1 * max(ms for r in results for _, _, ms in _series(r, metric)))
    axes.legend(fontsize="small")


def _bars(axes: Any, results: list[dict[str, Any]], metric: str) -> None:
    """Draws a group of bars for each batch size, for results of a single length."""
    groups = [_series(r, metric) for r in results]
    width = 0.8 / len(groups[0])
    for i, (label, _, _) in enumerate(groups[0]):
        at = [group + (i - (len(groups[0]) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(at, [series[i][2] for series in groups], width * 0.9, label=label)
    axes.set_xticks(range(len(groups)), [f"batch {r['batch_size']}" for r in results])
    axes.set_xlabel(f"{results[0]['input_len']:,} tokens")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.25)  # room for the legend
    axes.legend(fontsize="small", loc="upper left")


def _stack(axes: Any, bars: list[tuple[str, list[dict[str, float]]]], colors: Any) -> None:
    """Draws the stages of each size as a stacked bar; a stage that takes no time has no entry."""
    floor = [0.0] * len(bars)
    for i, name in enumerate(dict.fromkeys(name for _, ranks in bars for name in ranks[0])):
        ms = [sum(rank[name] for rank in ranks) / len(ranks) for _, ranks in bars]
        if any(ms):
            axes.bar([label for label, _ in bars], ms, bottom=floor, label=name, color=colors(i % 20))
            floor = [low + m for low, m in zip(floor, ms, strict=True)]
    if any(floor):
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _scale_axis(axes: Any) -> str:
    """The unit of a time axis whose data is in ms: seconds from 10,000 ms on."""
    if axes.get_ylim()[1] < 10_000:
        return "ms"
    axes.yaxis.set_major_formatter(lambda ms, _: f"{ms / 1e3:g}")
    return "s"
