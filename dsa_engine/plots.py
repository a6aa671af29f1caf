"""Plots of measured results; ``matplotlib`` (the extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

from typing import Any


def load_pyplot() -> Any:
    """``matplotlib.pyplot``, set up to draw to files; ``ValueError`` where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install 'dsa-engine[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_prefill(results: list[dict[str, Any]], path: str) -> None:
    """TTFT against length, and the stages of each length as a stacked bar (mean over ranks).

    Args:
        results: of :meth:`dsa_engine.benchmark.PrefillResult.to_json`.
        path: of the PNG.
    """
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    tokens = [r["input_len"] for r in results]
    left.plot(tokens, [r["median_ttft_ms"] / 1e3 for r in results], marker="o")
    left.set(xlabel="prompt tokens", ylabel="TTFT, s (median)", title="Time to first token")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    floor = [0.0] * len(results)
    for i, name in enumerate(results[0]["stage_ms"][0]):
        shares = [sum(rank[name] for rank in r["stage_ms"]) / len(r["stage_ms"]) / 1e3 for r in results]
        if any(shares):
            right.bar([f"{t:,}" for t in tokens], shares, bottom=floor, label=name, color=pyplot.cm.tab20(i % 20))
            floor = [low + s for low, s in zip(floor, shares, strict=True)]
    right.set(xlabel="prompt tokens", ylabel="s", title="Stages (mean over ranks)")
    right.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_latency(results: list[dict[str, Any]], metric: str, path: str) -> None:
    """Median and 99th percentile of ``metric`` ("ttft" or "tpot") against the prompt's length, a line a batch size.

    Args:
        results: of :meth:`dsa_engine.benchmark.LatencyResult.to_json`.
        path: of the PNG.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4.2), layout="constrained")
    for batch in sorted({r["batch_size"] for r in results}):
        rows = [r for r in results if r["batch_size"] == batch]
        tokens = [r["input_len"] for r in rows]
        (line,) = axes.plot(
            tokens, [r[f"median_{metric}_ms"] for r in rows], marker="o", label=f"batch {batch}, median"
        )
        axes.plot(tokens, [r[f"p99_{metric}_ms"] for r in rows], "--", color=line.get_color(), label="99th percentile")
    axes.set(xlabel="prompt tokens", ylabel=f"{metric.upper()}, ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
