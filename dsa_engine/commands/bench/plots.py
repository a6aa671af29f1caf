"""The plot of measured prefills."""

from __future__ import annotations

from collections.abc import Sequence

from dsa_engine.commands.bench.prefill_benchmark import PrefillResult
from dsa_engine.measure.plots import load_pyplot, save
from dsa_engine.measure.stage_timer import mean_stages


def plot_prefill(results: Sequence[PrefillResult], path: str, title: str) -> None:
    """Draws TTFT against length, and the stages of each length as a stacked bar (mean over ranks), into a PNG."""
    pyplot = load_pyplot()
    figure, (times, bars) = pyplot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    lengths = [f"{r.input_len:,}" for r in results]
    times.plot(lengths, [r.ttft.median for r in results], marker="o")
    times.set(xlabel="prompt tokens", ylabel="median TTFT, s", ylim=(0, None))
    stages = [mean_stages(r.stage_seconds) for r in results]
    below = [0.0] * len(results)
    for name in stages[0]:
        seconds = [one[name] for one in stages]
        if any(seconds):
            bars.bar(lengths, seconds, bottom=below, label=name)
            below = [low + s for low, s in zip(below, seconds, strict=True)]
    about = "Stages, mean over ranks\n(one run more; to watch it takes time, so the sum may exceed the left)"
    bars.set(xlabel="prompt tokens", ylabel="s", title=about)
    bars.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
