"""Gain of CUDA graphs and of each overlap in decode: time per output token with all of them, and without each.

Two batches are compared if ``--enable-dbo`` turns them on. For an
emulated rank a second table has what it waits for. One process creates the model anew for each variant; caches are
filled with random rows. If a variant leaves the device in an error, another process measures the others. On a CPU there
is nothing to turn off, and all rows do the same work.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from typing import Any

import torch

from dsa_engine.arguments import add_engine_arguments, add_json_argument, argument_parser, lengths, reported, run
from dsa_engine.commands.bench.generation_benchmark import check_latency, measure_latency
from dsa_engine.commands.bench.options import add_emulation_arguments
from dsa_engine.kernels.runtime.error_line import error_line
from dsa_engine.measure.across_ranks import num_processes
from dsa_engine.measure.device import in_another_process, is_lost
from dsa_engine.measure.emulation.arguments import heading, measured_llm, to_json
from dsa_engine.measure.report import format_table, read_so_far, run_report, write_so_far
from dsa_engine.parallel.launch_environment import several_processes
from dsa_engine.system.output_files import check_outputs

TWO_BATCHES = "two batches"
# Names of the features and the options that turn them off.
FEATURES: dict[str, dict[str, bool]] = {
    "CUDA graphs": {"enforce_eager": True},
    "async scheduling": {"no_async_scheduling": True},
    "overlap of the shared expert": {"no_overlap_shared_expert": True},
    "overlap of the indexer": {"no_overlap_indexer": True},
    TWO_BATCHES: {"enable_dbo": False},
}
# Features that are off by default, and the options that turn them on.
ASKED_FOR = {TWO_BATCHES: "--enable-dbo"}
VARIANTS: dict[str, dict[str, bool]] = {
    "nothing": {},
    **FEATURES,
    "all of them": {name: value for options in FEATURES.values() for name, value in options.items()},
}


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--input-len", type=lengths, default=[8192, 32768, 131072], help="context lengths, in tokens")
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once, of all ranks together")
    parser.add_argument("--output-len", type=int, default=64, help="tokens per request")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, after one that is not counted")
    parser.add_argument("--only", metavar="NAMES", help=f"some of: {', '.join(VARIANTS)}; separated by commas")
    add_json_argument(parser)
    parser.add_argument("--add", action="store_true", help="keep what the file of --json holds, and add to it")
    add_engine_arguments(parser)
    add_emulation_arguments(parser)
    args = parser.parse_args()
    if args.output_len < 2 or min(args.repeat, args.batch_size) < 1:
        raise ValueError("--output-len must be at least 2, --repeat and --batch-size at least 1")
    absent = {name for name in ASKED_FOR if not all(vars(args)[option] for option in FEATURES[name])}
    if args.only is None:
        args.only = [name for name in VARIANTS if name not in absent]
    else:
        args.only = args.only.split(",")
    for name in args.only:
        if name not in VARIANTS:
            raise ValueError(f"--only {name!r} is none of {', '.join(VARIANTS)}")
        if name in absent:
            raise ValueError(f"--only {name!r} needs {ASKED_FOR[name]}, which turns it on")
    if args.add and (not args.json or args.json == "-"):
        raise ValueError("--add adds to the file that --json names; name one")
    return args


def main() -> None:
    args = parse()
    check_outputs(args.json)
    comparison = Comparison(args)
    rest: list[str] = []
    try:
        for i, name in enumerate(args.only, 1):
            comparison.measure(name)
            if comparison.lost:
                rest = args.only[i:] if args.json and args.json != "-" else []
                break
    finally:  # also the results before an error or Ctrl-C
        if not rest:
            comparison.show()
    if rest:
        sys.exit(in_another_process("--only", ",".join(rest), "--add"))
    if comparison.failed:
        sys.exit(1)


class Comparison:
    """The results so far. The file holds each result as soon as it is measured."""

    def __init__(self, args: argparse.Namespace):
        self.failed: dict[str, str] = {}
        self._args = args
        self._results: list[dict[str, Any]] = []
        self._about: dict[str, Any] = {}
        self._reports = not several_processes()  # also if an engine fails to start
        self._device = self._above = ""
        self.lost = False  # a variant has left the device in an error
        if args.add:
            self._results, self.failed = read_so_far(args.json)

    def measure(self, name: str) -> None:
        """Measures all lengths of a variant. In a single process a variant that fails is reported, and the others go
        on."""
        try:
            self._measure(name)
        except RuntimeError as error:
            if several_processes():
                raise
            self.failed[name] = error_line(error)
            self.lost = torch.cuda.is_initialized() and is_lost(torch.device("cuda"))
        self._write(complete=name == self._args.only[-1])
        gc.collect()
        if not self.lost:
            torch.cuda.empty_cache()  # the next engine looks at the free memory; no engine is running

    def _measure(self, name: str) -> None:
        args = copy.copy(self._args)
        for option, value in VARIANTS[name].items():
            setattr(args, option, value)
        llm, links = measured_llm(args)
        engine = llm.engine
        self._reports, self._device = engine.mesh.is_leader, engine.mesh.device.type
        self._above = heading(engine, links)
        self._about = run_report(llm, reported(self._args), num_processes(engine)) | to_json(engine, links)
        for input_len in args.input_len:  # check all before measuring any
            check_latency(engine, input_len, args.output_len, args.batch_size, fill_cache=True)
        for input_len in args.input_len:
            measured = measure_latency(
                llm,
                input_len,
                args.output_len,
                batch_size=args.batch_size,
                repeat=args.repeat,
                seed=args.seed,
                links=links,
                fill_cache=True,
            )
            graphs = engine.graphs.memory_bytes if engine.graphs else 0
            self._results.append({"turned_off": name, "graph_memory_bytes": graphs, **measured.to_json()})
            self._write(complete=False)
        if engine.graphs:
            engine.graphs.close()

    def show(self) -> None:
        """Prints the table; nothing without a result."""
        if not self._reports:
            return
        if self._results:
            if self._above:
                print(self._above + "\n")
            sizes = self._args.input_len
            figure = "computed TPOT" if self._above else "TPOT"
            header = ("turned off", *(f"{figure} ms at {n:,}" for n in sizes))
            print(format_table(header, table(self._results, sizes)))
            if self._above:
                header = ("turned off", *(f"waits of communication, ms at {n:,}" for n in sizes))
                print(f"\n{format_table(header, waits(self._results, sizes))}\nModelled, for each output token.")
            if self._device == "cpu":
                print(
                    "\nOn a CPU there is nothing to turn off: all rows are the same work, and their ratios are noise."
                )
        for name, reason in self.failed.items():
            print(f"FAILED with {name} turned off: {reason}")

    def _write(self, complete: bool) -> None:
        if self._reports:
            write_so_far(self._args.json, {**self._about, "failed": self.failed}, self._results, complete=complete)


def table(results: list[dict[str, Any]], input_lens: list[int]) -> list[tuple[str, ...]]:
    """A row for each variant: its median times so far, and their ratio to those with everything on."""
    times = {
        (r["turned_off"], r["input_len"]): r.get("median_tpot_ms") or r["median_computed_tpot_ms"] for r in results
    }

    def cell(name: str, length: int) -> str:
        ms, base = times.get((name, length)), times.get(("nothing", length))
        return "" if ms is None else f"{ms:.2f}" + (f" ({ms / base:.2f}x)" if base else "")

    measured = dict.fromkeys(r["turned_off"] for r in results)
    return [(name, *(cell(name, length) for length in input_lens)) for name in measured]


def waits(results: list[dict[str, Any]], input_lens: list[int]) -> list[tuple[str, ...]]:
    """A row for each variant: modelled milliseconds in which the emulated rank waits, of those of all collectives."""
    times = {(r["turned_off"], r["input_len"]): r["tpot_ms"] for r in results if isinstance(r.get("tpot_ms"), dict)}

    def cell(name: str, length: int) -> str:
        ms = times.get((name, length))
        return "" if ms is None else f"{ms['overlapped'] - ms['computed']:.3f} of {ms['modelled_communication']:.3f}"

    measured = dict.fromkeys(name for name, _ in times)
    return [(name, *(cell(name, length) for length in input_lens)) for name in measured]


if __name__ == "__main__":
    run(main)
