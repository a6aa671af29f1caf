"""``dsa-engine plan``: the best cut of a model over devices, and its predicted times and rates."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from dsa_engine.arguments import json_object
from dsa_engine.commands.planner.check import Check
from dsa_engine.commands.planner.choices import AXES
from dsa_engine.commands.planner.handover import CheckedHandovers
from dsa_engine.commands.planner.plan import CannotCut, Demand, NothingFits, demand_json
from dsa_engine.commands.planner.prediction.devices import DEVICES, Device, device_named
from dsa_engine.commands.planner.prediction.efficiency import Efficiencies, read_measured
from dsa_engine.commands.planner.published import POINTS, published_table
from dsa_engine.commands.planner.search import Planner
from dsa_engine.commands.planner.sweep import plot_sweep, sweep, sweep_json, sweep_table
from dsa_engine.commands.planner.tables import print_not_fitting, print_plan, print_what_is_not_known
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import RELEASED_CONFIGS
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.report import write_json
from dsa_engine.model_folder import model_config
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar

TOGETHER = "Together: all ranks prefill and decode, as the engine runs today"
SPLIT = "Split: prefill and decode on separate devices (--prefill-ranks, one instance of each in a run)"


def run_plan(args: argparse.Namespace) -> None:
    """Prints the best plan of both kinds, or a sweep of them; or published operating points.

    Raises:
        ValueError, OSError: an option, the configuration or a file is not possible.
    """
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    if args.plot and not args.what_if:
        raise ValueError("--plot draws a sweep; say which with --what-if")
    if args.check:
        _check(args)
        return
    if args.published:
        if args.json:
            write_json(args.json, {"published": [point.to_json() for point in POINTS]})
        print(published_table())
        return
    figures = (args.devices, args.input_len, args.output_len, args.ttft, args.tpot, args.requests)
    demand = Demand(*figures, **_acceptance(args.acceptance))
    config = _config(args)
    device, reached = _device(args)
    names: tuple[str, ...] = (
        "cp_size", "tp_size", "chunk", "drafts", "weights", "cache", "moe_dispatch", "decode_dispatch"
    )  # fmt: skip
    names += ("dispatch_dtype", "combine_dtype", "prefetch_weights", "two_batches", "redundant_experts", "imbalance")
    fixed = {name: getattr(args, name) for name in names}
    planner = Planner(config, device, reached, {name: value for name, value in fixed.items() if value is not None})
    about: dict[str, Any] = {"model": args.model, "device": device.to_json(), "efficiencies": reached.source}
    about |= {"load": demand_json(demand)}
    if args.what_if:
        _sweep(args, planner, demand, about)
        return
    _plan(args, planner, demand, about)


def _plan(args: argparse.Namespace, planner: Planner, demand: Demand, about: dict[str, Any]) -> None:
    plans: dict[str, Any] = {}
    shown: list[Callable[[], None]] = []  # printed after the files are written
    for key, title in (("together", TOGETHER), ("split", SPLIT)):
        split = key == "split"
        if split and demand.devices < 2:
            continue
        try:
            plan = planner.best(demand, split)
        except NothingFits as error:
            remedy = None if split else planner.remedy(demand)
            plans[key] = {"lacking_bytes_per_rank": error.lacking, "nearest": error.nearest.to_json()}
            shown.append(partial(print_not_fitting, title, error, remedy))
        except CannotCut as error:
            if not split:
                raise
            remedy, plans[key] = None, {"impossible": str(error)}
            shown.append(partial(print, f"\n{title}\n  NOT POSSIBLE: {error}."))
        else:
            missed = plan.misses(demand) > 0
            remedy = planner.remedy(demand) if missed and not split else None
            plans[key] = plan.to_json() | {"misses_by": plan.misses(demand)}
            shown.append(partial(print_plan, title, plan, demand, remedy))
        plans[key]["devices_that_would_do"] = remedy
    try:
        if args.json:
            write_json(args.json, {**about, **plans})
    finally:  # the plans are shown even if the file cannot be written
        print(_title(args, planner, demand))
        for show in shown:
            show()
        print_what_is_not_known(planner, demand)


def _check(args: argparse.Namespace) -> None:
    if args.measured:
        _check_handovers(args)
        return
    check = Check("demo-random" if args.model in RELEASED_CONFIGS else args.model)
    runs = check.run()
    if not check.is_leader:
        return
    try:
        if args.json:
            results = {"check": check.title, "runs": [one.to_json() for one in runs]}
            write_json(args.json, check.environment() | results)
    finally:
        print(f"{check.title[0].upper()}{check.title[1:]}; medians of turns")
        for one in runs:
            print("\n" + one.table())


def _check_handovers(args: argparse.Namespace) -> None:
    checked = {path: CheckedHandovers.read(path) for path in args.measured.split(",")}
    try:
        if args.json:
            write_json(args.json, {"handovers": {path: one.to_json() for path, one in checked.items()}})
    finally:
        print(
            "\n\n".join(
                f"{path}, times modelled from the rate of its link\n{one.table()}" for path, one in checked.items()
            )
        )


def _sweep(args: argparse.Namespace, planner: Planner, demand: Demand, about: dict[str, Any]) -> None:
    points = []
    with progress_bar(len(AXES[args.what_if](demand)), "plans", f"--what-if {args.what_if}") as bar:
        for point in sweep(planner, demand, args.what_if):
            points.append(point)
            bar.update(1)
    try:
        if args.json:
            write_json(args.json, {**about, "what_if": args.what_if, "points": sweep_json(points)})
        if args.plot:
            plot_sweep(args.what_if, points, args.plot, _title(args, planner, demand))
    finally:
        print(sweep_table(args.what_if, points))
        print_what_is_not_known(planner, demand)


def _title(args: argparse.Namespace, planner: Planner, demand: Demand) -> str:
    given = {"input-len": f"{demand.input_len:,} tokens in", "devices": f"{demand.devices} devices"}
    fixed = [text for axis, text in given.items() if axis != args.what_if]
    fixed.append(f"{demand.output_len:,} tokens out")
    return f"Predicted, {args.model} on {planner.device.name}: {', '.join(fixed)}"


def _config(args: argparse.Namespace) -> ModelConfig:
    return model_config(args.model, json_object(args.hf_overrides, "--hf-overrides"))


def _device(args: argparse.Namespace) -> tuple[Device, Efficiencies]:
    device = device_named(args.device)
    if not args.measured:
        return device, Efficiencies.assumed()
    ceilings, entries, name = read_measured(args.measured.split(","))
    if not device.is_called(name):
        fitting = [f"--device {known.name}" for known in DEVICES.values() if known.is_called(name)]
        advice = fitting[0] if fitting else f"files that were measured on a device of {', '.join(DEVICES)}"
        where = f"measured on {name}, not on --device {device.name}"
        raise ValueError(f"--measured {args.measured}: {where}; give {advice}")
    device = device.with_ceilings(ceilings)
    return device, Efficiencies.fitted(entries, device, f"stages as measured on {name}, {len(entries)} run(s)")


def _acceptance(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return {"acceptance": tuple(float(rate) for rate in text.split(","))}
    except ValueError as error:
        raise ValueError(f"--acceptance {text}: {error}") from error
