"""Gain of CUDA graphs and of each overlap in decode: time per output token with all of them, and without each.

One process creates the model anew for each row; caches are filled with random rows. Micro-batches are compared if
``--enable-dbo`` turns them on. On a CPU there is nothing to turn off: all rows do the same work.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
from typing import Any

import torch

from dsa_engine.commands.arguments import (
    add_engine_arguments,
    add_json_argument,
    argument_parser,
    lengths,
    reported,
    run,
)
from dsa_engine.commands.bench.generation_benchmark import check_latency, measure_latency
from dsa_engine.commands.bench.options import add_emulation_arguments
from dsa_engine.kernels.runtime.operation import error_line
from dsa_engine.measure.emulation.arguments import HEADING, described, measured_llm, to_json
from dsa_engine.measure.report import format_table, run_report, write_so_far
from dsa_engine.system.output_files import check_outputs

SIDE_STREAMS = "side streams"
# Names of the features and the options that turn them off.
FEATURES: dict[str, dict[str, bool]] = {
    "CUDA graphs": {"enforce_eager": True},
    "async scheduling": {"async_scheduling": False},
    SIDE_STREAMS: {},  # by an environment variable
    "micro-batches": {"enable_dbo": False},
}


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--input-len", type=lengths, default=[8192, 32768, 131072], help="context lengths, in tokens")
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once, of all ranks together")
    parser.add_argument("--output-len", type=int, default=64, help="tokens per request")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, after one that is not counted")
    add_json_argument(parser)
    add_engine_arguments(parser)
    add_emulation_arguments(parser)
    args = parser.parse_args()
    if args.output_len < 2 or min(args.repeat, args.batch_size) < 1:
        raise ValueError("--output-len must be at least 2, --repeat and --batch-size at least 1")
    return args


def main() -> None:
    """Measures each row; the file has every result as soon as it is measured, and the table those before an error."""
    args = parse()
    check_outputs(args.json)
    features = {name: off for name, off in FEATURES.items() if name != "micro-batches" or args.enable_dbo}
    everything = {name: value for options in features.values() for name, value in options.items()}
    results: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    leads = True  # also if an engine fails to start
    try:
        for name, options in {"nothing": {}, **features, "all of them": everything}.items():
            try:
                leads = measure(args, name, options, results)
            except RuntimeError as error:
                failed[name] = error_line(error)
            gc.collect()
            torch.cuda.empty_cache()  # the next engine looks at the free memory
    finally:
        if leads and results:
            header = ("turned off", *(f"TPOT ms at {n:,}" for n in args.input_len))
            print(format_table(header, table(results, args.input_len)))
    for name, reason in failed.items():
        print(f"FAILED with {name} turned off: {reason}")
    sys.exit(bool(failed))


def measure(args: argparse.Namespace, name: str, options: dict[str, bool], results: list[dict[str, Any]]) -> bool:
    """Adds the results of all lengths; whether this rank reports."""
    changed = copy.copy(args)
    vars(changed).update(options)
    os.environ["DSA_ENGINE_SIDE_STREAMS"] = str(int(name not in (SIDE_STREAMS, "all of them")))
    llm = measured_llm(changed)
    engine = llm.engine
    for input_len in args.input_len:  # check all before measuring any
        check_latency(engine, input_len, args.output_len, args.batch_size, fill_cache=True)
    if engine.mesh.is_leader and not results and (above := described(engine, HEADING)):
        print(above)
    about = run_report(llm, reported(args), engine.mesh.processes.size) | to_json(engine)
    for input_len in args.input_len:
        sizes = {"batch_size": args.batch_size, "repeat": args.repeat, "seed": args.seed}
        measured = measure_latency(llm, input_len, args.output_len, fill_cache=True, **sizes)
        results.append({"turned_off": name, **measured.to_json()})
        if engine.mesh.is_leader:
            write_so_far(args.json, about, results, complete=False)
    if engine.graphs:
        engine.graphs.close()
    if engine.mesh.is_leader:
        write_so_far(args.json, about, results, complete=name == "all of them" and input_len == args.input_len[-1])
    return engine.mesh.is_leader


def table(results: list[dict[str, Any]], input_lens: list[int]) -> list[tuple[str, ...]]:
    """A row for each feature: its median times so far, and their ratio to those with everything on."""
    times = {(r["turned_off"], r["input_len"]): r["median_tpot_ms"] for r in results}

    def cell(name: str, length: int) -> str:
        ms, base = times.get((name, length)), times.get(("nothing", length))
        return "" if ms is None else f"{ms:.2f}" + (f" ({ms / base:.2f}x)" if base else "")

    return [(name, *(cell(name, n) for n in input_lens)) for name in dict.fromkeys(r["turned_off"] for r in results)]


if __name__ == "__main__":
    run(main)
