"""Plots of the training and of the model's retrieval, as PNG."""

from __future__ import annotations

from typing import Any

from dsa_engine.measure.plots import load_pyplot, save


def plot_losses(log: list[dict[str, Any]], path: str) -> None:
    """Losses and fractions of right predictions against training tokens, means over ten steps, with a line at the start
    of each phase."""
    pyplot = load_pyplot()
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(10, 9), sharex=True, layout="constrained")
    draw = _Smooth(log)
    for name, label in (("loss", "next token, weighed"), ("text", "text tokens"), ("mtp_loss", "MTP module, weighed")):
        top.plot(*draw.line(lambda step, name=name: step[name]), label=label)
    top.set(ylabel="loss, nats")
    for name, label in (("values", "asked values, next token"), ("mtp_right", "MTP module, second next tokens")):
        middle.plot(*draw.line(lambda step, name=name: step[name] or None), label=label)
    middle.set(ylabel="share known", ylim=(0, 1))
    layers = max(len(step["index_losses"]) for step in log)
    for i in range(layers):
        name = f"indexer of layer {i}" if i < layers - 1 else "indexer of the MTP module"
        bottom.plot(*draw.line(lambda step, i=i: (step["index_losses"] or [None] * layers)[i]), label=name)
    bottom.set(xlabel="training tokens, millions", ylabel="KL divergence, nats", ylim=(0, None))
    phase, phases = None, 0
    for step in log:
        if step["phase"] != phase:
            phase, phases = step["phase"], phases + 1
            for axes in (top, middle, bottom):
                axes.axvline(step["tokens"] / 1e6, color="grey", linewidth=0.7)
            height = 1.0 if phases % 2 else 1.17  # alternating, as short phases are close together
            x = step["tokens"] / 1e6
            top.text(x, height, phase, rotation=60, fontsize="x-small", transform=top.get_xaxis_transform())
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save(figure, path, dpi=110)


class _Smooth:
    def __init__(self, log: list[dict[str, Any]], width: int = 10):
        self.parts = [log[i : i + width] for i in range(0, len(log), width)]

    def line(self, value: Any) -> tuple[list[float], list[float]]:
        tokens, means = [], []
        for part in self.parts:
            values = [v for step in part if (v := value(step)) is not None]
            if values:
                tokens.append(part[-1]["tokens"] / 1e6)
                means.append(sum(values) / len(values))
        return tokens, means


def plot_retrieval(results: list[dict[str, Any]], path: str, title: str = "") -> None:
    """The usual heat map: fraction of right answers by length of the document and depth of the fact. Below each length:
    all depths together, and the number of cases in a cell."""
    pyplot = load_pyplot()
    depths = [f"{i / 10:.1f}" for i in range(10)]
    grid = [[r["accuracy_by_depth"].get(depth, float("nan")) for r in results] for depth in depths]
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.1 * len(results), 5), layout="constrained")
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for i, row in enumerate(grid):
        for j, rate in enumerate(row):
            if rate == rate:
                axes.text(j, i, f"{rate:.0%}", ha="center", va="center", fontsize="small")
    labels = [f"{r['length'] // 1024}K\n{r['accuracy']:.1%}\n{_cases_of_a_cell(r)} a cell" for r in results]
    axes.set_xticks(range(len(results)), labels)
    axes.set_yticks(range(10), [f"{10 * i} – {10 * i + 10}%" for i in range(10)])
    axes.set(xlabel="document, tokens; right at all depths together; cases", ylabel="depth of the fact")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, label="fraction of right answers")
    save(figure, path, dpi=110)


def _cases_of_a_cell(result: dict[str, Any]) -> str:
    each, more = divmod(result["cases"], len(result["accuracy_by_depth"]))
    return f"{each} to {each + 1}" if more else f"{each}"
