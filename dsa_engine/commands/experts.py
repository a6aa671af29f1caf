"""``dsa-engine experts``: loads of experts as a heat map, and how even a placement makes them."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dsa_engine.measure.plots import check_plot, load_pyplot, save
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.parallel.experts.balance import imbalance
from dsa_engine.parallel.experts.loads_file import ExpertLoads
from dsa_engine.system.output_files import check_outputs, keep_stdout

_LIMITS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # between levels of a load over its layer's mean
_CHARACTERS = " .:-=+*#%@"
_COLORS = (17, 18, 19, 26, 31, 36, 71, 142, 208, 196)  # numbers of the 256 terminal colours: dark blue to red


class LayerLoads(NamedTuple):
    """The loads of a layer.

    Attributes:
        relative: of each expert, over the layer's mean.
        in_order, planned: the largest load of a rank over the mean of all ranks, with experts in order, and as the
            engine places them by these loads; None: no ranks are given. Without replicas there may be too few experts.
    """

    layer: int
    relative: tuple[float, ...]
    in_order: float | None
    planned: float | None

    @property
    def busiest(self) -> int:
        return self.relative.index(max(self.relative))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="loads, as record_expert_loads writes them")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="also the largest load of a rank, with experts in order and as planned"
    )
    parser.add_argument(
        "--redundant-experts", type=int, default=0, metavar="M", help="replicas in each layer, on all ranks together"
    )
    parser.add_argument("--plot", metavar="PATH", help="draw the loads here (.png)")
    parser.add_argument("--json", metavar="PATH", help="write the figures here too; '-': to standard output")


def run_experts(args: argparse.Namespace) -> None:
    """Prints a heat map and a table of the layers.

    Raises:
        ValueError, OSError: a file or an option is not possible.
    """
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    if args.json == "-":
        keep_stdout()
    if args.ranks is None and args.redundant_experts:
        raise ValueError(f"--redundant-experts {args.redundant_experts} needs --ranks, the number of ranks")
    for name, value, least in (("--ranks", args.ranks, 1), ("--redundant-experts", args.redundant_experts, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    loads = ExpertLoads.read(args.file)
    layers = list(layer_loads(loads, args.ranks, args.redundant_experts))
    print(f"{loads.model}: {len(layers)} layers, {loads.experts} experts in each\n")
    columns = shutil.get_terminal_size().columns
    print("\n".join(heat_map(layers, columns, colored=_shows_colors())), end="\n\n")
    print(_table(layers, args.ranks, args.redundant_experts))
    result = {
        "model": loads.model,
        "ranks": args.ranks,
        "redundant_experts": args.redundant_experts,
        "layers": [
            {
                "layer": one.layer,
                "busiest": one.busiest,
                "max_over_mean": max(one.relative),
                "rank_max_over_mean": {"in_order": one.in_order, "planned": one.planned} if args.ranks else None,
                "relative_loads": one.relative,
            }
            for one in layers
        ],
    }
    if args.json:
        write_json(args.json, result)
    if args.plot:
        plot_loads(loads.model, layers, args.plot)


def layer_loads(loads: ExpertLoads, ranks: int | None, redundant: int) -> Iterator[LayerLoads]:
    """What is shown of each layer.

    Args:
        ranks: over which experts are divided; None: unknown.
        redundant: number of replicas in the plan.

    Raises:
        ValueError: the numbers of experts, replicas and ranks do not fit.
    """
    from dsa_engine.parallel.experts.layer_placements import LayerPlacements

    in_order = LayerPlacements(ranks) if ranks is not None and ranks <= loads.experts else None
    plan = None if ranks is None else LayerPlacements(ranks, 1, redundant, loads)
    for layer in loads.layers:
        own = loads.of_layer(layer) or (1.0,) * loads.experts
        mean = math.fsum(own) / len(own)
        before, after = (
            None if one is None else imbalance(own, one.held(len(own), layer, groups=1)) for one in (in_order, plan)
        )
        yield LayerLoads(layer, tuple(load / mean for load in own), before, after)


def heat_map(layers: Sequence[LayerLoads], columns: int, colored: bool) -> list[str]:
    """Lines of at most ``columns`` characters: a row for each layer, a character for each expert, or for the largest
    load of as many consecutive ones as are needed to fit."""
    experts = len(layers[0].relative)
    label = max(len("layer"), *(len(str(one.layer)) for one in layers)) + 2
    each = math.ceil(experts / max(8, columns - label))
    lines = [f"{'layer':<{label}}" + ("a character is an expert" if each == 1 else f"a character is {each} experts")]
    for one in layers:
        bins = [max(one.relative[first : first + each]) for first in range(0, experts, each)]
        lines.append(f"{one.layer:<{label}}" + "".join(_cell(bisect_right(_LIMITS, load), colored) for load in bins))
    scale = [(level, f"{limit:g}") for level, limit in enumerate((0.0, *_LIMITS))]
    legend = "  ".join(f"{_cell(level, colored)} {limit}" for level, limit in scale)
    return [*lines, f"{'':<{label}}load over the layer's mean, from: {legend}"]


def plot_loads(model: str, layers: Sequence[LayerLoads], path: str) -> None:
    """Draws a heat map as a PNG."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(12, 1.5 + 0.15 * max(8, len(layers))), layout="constrained")
    image = axes.imshow(
        [one.relative for one in layers], aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0
    )
    figure.colorbar(image, label="load over the layer's mean")
    axes.set(title=f"{model}: loads of experts", xlabel="expert", ylabel="layer")
    shown = range(0, len(layers), math.ceil(len(layers) / 20))
    axes.set_yticks(shown, [str(layers[number].layer) for number in shown])
    save(figure, path)


def _table(layers: Sequence[LayerLoads], ranks: int | None, redundant: int) -> str:
    header = ["layer", "busiest expert", "its load over the mean"]
    if ranks is not None:
        replicas = f" + {redundant} replicas" if redundant else ""
        header += [f"{ranks} ranks, max/mean in order", f"as planned{replicas}"]
    rows: list[list[object]] = []
    for one in layers:
        of_ranks = [] if ranks is None else ["–" if x is None else f"{x:.2f}" for x in (one.in_order, one.planned)]
        rows.append([str(one.layer), str(one.busiest), f"{max(one.relative):.2f}", *of_ranks])
    return format_table(header, rows)


def _cell(level: int, colored: bool) -> str:
    return f"\x1b[48;5;{_COLORS[level]}m \x1b[0m" if colored else _CHARACTERS[level]


def _shows_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
