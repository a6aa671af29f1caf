"""Plans over a range of one part of the demand, with everything else fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dsa_engine.commands.planner.choices import AXES
from dsa_engine.commands.planner.plan import CannotCut, Demand, DeploymentPlan, NothingFits
from dsa_engine.commands.planner.search import Planner
from dsa_engine.measure.plots import load_pyplot, save
from dsa_engine.measure.report import format_table


class SweepPoint(NamedTuple):
    """One value of the axis; a plan is None if nothing fits or fixed sizes do not divide the devices."""

    value: float
    together: DeploymentPlan | None
    split: DeploymentPlan | None
    demand: Demand


def sweep(planner: Planner, demand: Demand, axis: str) -> Iterator[SweepPoint]:
    """The plans for every value of an axis of ``AXES``."""
    name = axis.replace("-", "_")
    values, max_len = AXES[axis](demand), planner.config.max_position_embeddings
    if axis == "input-len":
        values = [value for value in values if value + demand.output_len <= max_len]
    for value in values:
        whole = value if axis in ("tpot", "ttft") else max(1, round(value))
        changed = replace(demand, **{name: whole})  # type: ignore[arg-type]
        together, split = (_best(planner, changed, split, axis) for split in (False, True))
        yield SweepPoint(whole, together, split, changed)


def _best(planner: Planner, demand: Demand, split: bool, axis: str) -> DeploymentPlan | None:
    if split and demand.devices < 2:
        return None
    try:
        return planner.best(demand, split)
    except NothingFits:
        return None
    except CannotCut:
        if split or axis == "devices":
            return None
        raise


def sweep_table(axis: str, points: list[SweepPoint]) -> str:
    rows = [(f"{p.value:g}", *_row(p.together, p.demand), *_row(p.split, p.demand)) for p in points]
    columns = ("TTFT s", "TPOT ms", "requests", "tokens/s a device")
    return format_table((axis, *columns, *(f"split: {name}" for name in columns)), rows)


def _row(plan: DeploymentPlan | None, demand: Demand) -> tuple[str, ...]:
    if plan is None:
        return ("does not fit", "", "", "")
    missed = " (missed)" if plan.misses(demand) > 0 else ""
    rate = f"{plan.tokens_per_s / plan.devices:.1f}{missed}"
    return (f"{plan.ttft:.3g}", f"{plan.tpot * 1e3:.3g}", f"{plan.requests:,}", rate)


def sweep_json(points: list[SweepPoint]) -> list[dict[str, Any]]:
    return [
        {
            "value": p.value,
            "together": p.together.to_json() if p.together else None,
            "split": p.split.to_json() if p.split else None,
        }
        for p in points
    ]


def plot_sweep(axis: str, points: list[SweepPoint], path: str, title: str) -> None:
    """TTFT, TPOT and rate against the axis; plans that miss the demand are hollow."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    figures: tuple[tuple[str, Callable[[DeploymentPlan], float]], ...] = (
        ("TTFT, s", lambda plan: plan.ttft),
        ("TPOT, ms", lambda plan: plan.tpot * 1e3),
        ("output tokens/s a device", lambda plan: plan.tokens_per_s / plan.devices),
    )
    for panel, (label, of) in zip(panels, figures, strict=True):
        for name, style, color in (("together", "-", "tab:blue"), ("split", "--", "tab:orange")):
            drawn = [(p.value, getattr(p, name), p.demand) for p in points if getattr(p, name) is not None]
            panel.plot([x for x, _, _ in drawn], [of(plan) for _, plan, _ in drawn], style, color=color, label=name)
            for x, plan, demand in drawn:
                fill = color if plan.misses(demand) <= 0 else "white"
                panel.plot([x], [of(plan)], "o", color=color, markerfacecolor=fill)
        panel.set(xlabel=axis, ylabel=label, xscale="log", ylim=(0, None))
        panel.set_xticks([p.value for p in points], [f"{p.value:,g}" for p in points], fontsize="small")
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    panels[0].plot([], [], "o", color="gray", markerfacecolor="white", label="misses what was asked")
    panels[0].legend(fontsize="small")
    save(figure, path)
