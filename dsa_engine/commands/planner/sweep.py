"""One thing about a load changed, and all else as it was: what becomes of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dsa_engine.commands.planner.plan import CannotCut, Load, NothingFits, Plan
from dsa_engine.commands.planner.search import Planner
from dsa_engine.measure.plots import load_pyplot, save
from dsa_engine.measure.report import format_table

AXES: dict[str, Callable[[Load], list[float]]] = {
    "devices": lambda load: [load.devices * factor for factor in (0.25, 0.5, 1, 2, 4) if load.devices * factor >= 1],
    "input-len": lambda load: [load.input_len * factor for factor in (0.0625, 0.125, 0.25, 0.5, 1, 2)],
    "requests": lambda load: [(load.requests or load.devices) * factor for factor in (0.25, 0.5, 1, 2, 4)],
    "tpot": lambda load: [(load.tpot or 0.05) * factor for factor in (0.5, 0.75, 1, 1.5, 2, 3)],
    "ttft": lambda load: [(load.ttft or 2.0) * factor for factor in (0.5, 1, 2, 4, 8)],
}


class Point(NamedTuple):
    """One value of the axis; a plan is None where nothing fits, or sizes that are fixed do not divide the devices."""

    value: float
    together: Plan | None
    split: Plan | None
    load: Load


def sweep(planner: Planner, load: Load, axis: str) -> Iterator[Point]:
    """The plans for every value of an axis of ``AXES``."""
    name = axis.replace("-", "_")
    values, most = AXES[axis](load), planner.config.max_position_embeddings
    if axis == "input-len":
        values = [value for value in values if value + load.output_len <= most]
    for value in values:
        whole = value if axis in ("tpot", "ttft") else max(1, round(value))
        changed = replace(load, **{name: whole})  # type: ignore[arg-type]
        together, split = (_best(planner, changed, split, axis) for split in (False, True))
        yield Point(whole, together, split, changed)


def _best(planner: Planner, load: Load, split: bool, axis: str) -> Plan | None:
    if split and load.devices < 2:
        return None
    try:
        return planner.best(load, split)
    except NothingFits:
        return None
    except CannotCut:
        if split or axis == "devices":
            return None
        raise


def sweep_table(axis: str, points: list[Point]) -> str:
    rows = [(f"{p.value:g}", *_row(p.together, p.load), *_row(p.split, p.load)) for p in points]
    columns = ("TTFT s", "TPOT ms", "requests", "tokens/s a device")
    return format_table((axis, *columns, *(f"split: {name}" for name in columns)), rows)


def _row(plan: Plan | None, load: Load) -> tuple[str, ...]:
    if plan is None:
        return ("does not fit", "", "", "")
    missed = " (missed)" if plan.misses(load) > 0 else ""
    rate = f"{plan.tokens_per_s / plan.devices:.1f}{missed}"
    return (f"{plan.ttft:.3g}", f"{plan.tpot * 1e3:.3g}", f"{plan.requests:,}", rate)


def sweep_json(points: list[Point]) -> list[dict[str, Any]]:
    return [
        {
            "value": p.value,
            "together": p.together.to_json() if p.together else None,
            "split": p.split.to_json() if p.split else None,
        }
        for p in points
    ]


def plot_sweep(axis: str, points: list[Point], path: str, title: str) -> None:
    """TTFT, TPOT and rate against the axis; plans that miss the load are hollow."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    figures: tuple[tuple[str, Callable[[Plan], float]], ...] = (
        ("TTFT, s", lambda plan: plan.ttft),
        ("TPOT, ms", lambda plan: plan.tpot * 1e3),
        ("output tokens/s a device", lambda plan: plan.tokens_per_s / plan.devices),
    )
    for panel, (label, of) in zip(panels, figures, strict=True):
        for name, style, color in (("together", "-", "tab:blue"), ("split", "--", "tab:orange")):
            found = [(p.value, getattr(p, name), p.load) for p in points if getattr(p, name) is not None]
            panel.plot([x for x, _, _ in found], [of(plan) for _, plan, _ in found], style, color=color, label=name)
            for x, plan, load in found:
                fill = color if plan.misses(load) <= 0 else "white"
                panel.plot([x], [of(plan)], "o", color=color, markerfacecolor=fill)
        panel.set(xlabel=axis, ylabel=label, xscale="log", ylim=(0, None))
        panel.set_xticks([p.value for p in points], [f"{p.value:,g}" for p in points], fontsize="small")
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    panels[0].plot([], [], "o", color="gray", markerfacecolor="white", label="misses what was asked")
    panels[0].legend(fontsize="small")
    save(figure, path)
