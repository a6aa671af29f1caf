"""Serving, here or at a server: ``scripts/bench_serve.py`` and ``dsa-engine bench serve``."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from typing import Any

from dsa_engine.arguments import add_engine_arguments, engine_options, llm_from, reported
from dsa_engine.commands.bench.serving.datasets import DATASETS, Dataset
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.plot import plot_serving
from dsa_engine.commands.bench.serving.result import ServingResult, compared
from dsa_engine.commands.bench.serving.tables import print_serving, read_goals
from dsa_engine.commands.early import Early
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.report import caption, run_report, versions, write_json
from dsa_engine.options import EngineOptions
from dsa_engine.parallel.launch_environment import several_processes
from dsa_engine.system.output_files import check_outputs

_AT_SERVERS = ("model", "seed", "no_progress")  # the engine's options that have a meaning there

_Measured = tuple[list[ServingResult], dict[str, Any]]  # the results of each pass, and what the report says of the run


def run_serving(args: argparse.Namespace) -> None:
    """Serves the requests and reports: the files first, then the tables.

    Raises:
        ValueError, OSError: an option or a file is not possible, or a server refuses; then nothing has been measured.
    """
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    goals = read_goals(args.goodput or [])
    if args.num_warmups < 0:
        raise ValueError(f"--num-warmups must be at least 0, not {args.num_warmups}")
    load = ServingLoad(
        _dataset(args), args.request_rate, args.burstiness, args.max_concurrency, args.ignore_eos, args.seed
    )
    measured = _at_server(args, load, goals) if args.base_url else _in_process(args, load, goals)
    if measured is None:
        return
    (*others, result), about = measured
    without = others[0] if others else None
    try:
        if args.json:
            write_json(args.json, about | compared(result, without))
        if args.plot:
            title = about["server"]["url"] if args.base_url else caption(about)
            plot_serving(result, without, args.plot, title)
    finally:  # the tables are there even if a file cannot be written
        print_serving(result, without)


def _dataset(args: argparse.Namespace) -> Dataset:
    """The dataset of ``--dataset-name``, with its options."""
    kind = DATASETS[args.dataset_name]
    names = [f.name for f in fields(kind)]
    if "num_prompts" not in names and args.num_prompts is not None:
        raise ValueError(
            f"--num-prompts is not an option of {kind.name}, whose number of requests is --gsp-num-groups × "
            "--gsp-prompts-per-group × --gsp-num-turns; leave it out"
        )
    given = {name: getattr(args, kind.flag(name)[2:].replace("-", "_")) for name in names}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _passes(args: argparse.Namespace, both: bool) -> tuple[bool, ...]:
    """Whether requests may hit, in each pass; ``both``: compare unless ``--prefix-hits`` says otherwise."""
    asked = args.prefix_hits or ("both" if both else "on")
    return {"on": (True,), "off": (False,), "both": (False, True)}[asked]


def _in_process(args: argparse.Namespace, load: ServingLoad, goals: dict[str, float]) -> _Measured | None:
    """None on a rank that does not report."""
    for name in ("backend", "endpoint"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} says how to ask a server: give its address with --base-url, or leave it out")
    caching = EngineOptions(**engine_options(args)).enable_prefix_caching
    if not caching and args.prefix_hits in ("on", "both"):
        raise ValueError(
            f"--prefix-hits {args.prefix_hits} needs the prefix cache; leave out --no-enable-prefix-caching"
        )
    passes = _passes(args, both=load.dataset.common_prefixes and caching)
    Early(args).check_lengths(*load.longest())
    from dsa_engine.commands.bench.serving import in_process  # it imports torch

    llm = llm_from(args)
    in_process.check_serving(llm.engine, load)
    results = [in_process.measure_serving(llm.engine, load, goals, args.num_warmups, hits=hits) for hits in passes]
    if not llm.engine.mesh.is_leader:
        return None
    return results, run_report(llm, _given(args, load), llm.engine.mesh.world_size)


def _at_server(args: argparse.Namespace, load: ServingLoad, goals: dict[str, float]) -> _Measured:
    engine = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(engine)
    defaults = vars(engine.parse_args([]))
    for name, default in defaults.items():
        if name not in _AT_SERVERS and getattr(args, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} is an option of the engine in this process; with --base-url the server "
                "has its own: leave it out"
            )
    if several_processes():
        raise ValueError("--base-url needs one process: leave out torchrun, the server has its own ranks")
    try:
        from dsa_engine.commands.bench.serving.over_http import measure_server
    except ModuleNotFoundError as error:
        raise ValueError(f'--base-url needs {error.name}; install it with: pip install "dsa-engine[serve]"') from error
    results, server = measure_server(
        args.base_url,
        args.backend or "openai",
        args.endpoint,
        None if args.model == defaults["model"] else args.model,
        load,
        goals,
        args.num_warmups,
        passes=_passes(args, both=False),
        progress=not args.no_progress,
    )
    given = {name: value for name, value in _given(args, load).items() if name in _AT_SERVERS or name not in defaults}
    return results, versions("httpx") | {"server": server, "options": given}


def _given(args: argparse.Namespace, load: ServingLoad) -> dict[str, Any]:
    """The options for the report."""
    rate = {"request_rate": "inf"} if math.isinf(args.request_rate) else {}
    return reported(args) | rate | {name: value for name, value in vars(load.dataset).items() if name == "num_prompts"}
