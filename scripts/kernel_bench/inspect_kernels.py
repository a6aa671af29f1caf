"""Compiles every kernel at production sizes, without a GPU, and shows its registers, spills, shared memory and
instructions.

"at most" is the fraction of its ceiling that the inner loop can reach: a bound from its machine code (SASS), not
measured. The ceiling is the tensor cores' rate, or the memory's if an operation's reads and writes take longer than its
products. A kernel has a line for each ceiling of its operations, with the operation that has the smallest fraction;
"limit" is the unit that takes longest. JSON has all units and all operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton

from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar
from kernel_cases.cases import CASES, named
from machine_code.compile_counts import counts, renewed
from machine_code.inspection import SHARED_LIMIT, faults, inspect

COLUMNS = (
    "kernel",
    "warps",
    "registers",
    "spilled",
    "shared",
    "wgmma",
    "warpgroup_waits",
    "mma",
    "tcgen05",
    "fp8",
    "loads_16",
)


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--target", type=int, nargs="+", default=[90], choices=sorted(SHARED_LIMIT), help="compute capabilities"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(CASES)}")
    add_json_argument(parser)
    parser.add_argument("--counts", metavar="PATH", help="renew in this file what this Triton compiles for the targets")
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = named(args.only)
    if args.counts and args.only:
        raise ValueError("--counts counts all kernels; leave --only out")
    check_outputs(args.json, args.counts)
    if args.counts:
        renewed(args.counts, triton.__version__, {})  # refuses a wrong file before minutes of compiling
    result: dict[str, Any] = {}
    missing: dict[str, list[str]] = {}
    with progress_bar(len(args.target) * len(names), "cases", "compiling") as bar:
        for target in args.target:
            bar.set_postfix_str(f"sm_{target}")
            result[f"sm_{target}"], missing[f"sm_{target}"] = inspect(target, names, bar.update)
            for kernel in result[f"sm_{target}"]:
                kernel["faults"] = faults(kernel, target)
    if args.json:
        write(args.json, result, missing)
    if args.counts:
        counted = {target: counts(kernels, missing[target]) for target, kernels in result.items()}
        write_json(args.counts, renewed(args.counts, triton.__version__, counted))
    for name, kernels in result.items():
        print(f"{name}: bytes spilled a thread, bytes of shared memory a program; not run, not timed")
        print(format_table((*COLUMNS, "at most", "of", "limit", "for instance in"), list(lines(kernels))))
        for kernel in kernels:
            for fault in kernel["faults"]:
                print(f"{kernel['kernel']} ({kernel['operation']}: {kernel['shape']}) {fault}")
        for reason in missing[name]:
            print(f"not compiled: {reason}")
        print()


def lines(kernels: Iterable[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for kernel in kernels:
        least: dict[str, dict[str, Any]] = {}
        for judged in kernel["at_most"]:
            fraction, before = judged["share"], least.get(judged["ceiling"])
            if before is None or fraction is not None and fraction < (before["share"] or 0):
                least[judged["ceiling"]] = judged
        for ceiling, judged in least.items():
            fraction = "" if judged["share"] is None else f"{judged['share']:.0%}"
            where = f"{judged['operation']}: {judged['shapes'][0]}"
            yield *(kernel[c] for c in COLUMNS), fraction, ceiling, judged["limit"], where


def write(path: str, result: dict[str, Any], missing: dict[str, list[str]]) -> None:
    versions = environment(torch.device("cpu"), torch.bfloat16, 1)["versions"]
    note = "compiled without a GPU: nothing was run or timed; bound: from SASS, not measured"
    about = {"versions": versions, "measured_on": None, "note": note}
    write_json(path, {**about, "kernels": result, "not_compiled": missing})


if __name__ == "__main__":
    run(main)
