"""Compiles every kernel at production sizes, with no GPU needed, and shows what it takes on the chip.

"at most" is the share of the tensor cores' ceiling that the inner loop can reach: a bound from its machine code (SASS),
not measured. It is the time of the products over that of the unit named, which takes longest; JSON has all units.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from dsa_engine.arguments import argument_parser, run
from dsa_engine.measure.kernel_cases.cases import CASES, named
from dsa_engine.measure.kernel_cases.inspection import SHARED_LIMIT, faults, inspect
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.output_files import check_outputs

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
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = named(args.only)
    check_outputs(args.json)
    result: dict[str, Any] = {}
    missing: dict[str, list[str]] = {}
    for target in args.target:
        result[f"sm_{target}"], missing[f"sm_{target}"] = inspect(target, names)
        for kernel in result[f"sm_{target}"]:
            kernel["faults"] = faults(kernel, target)
    if args.json:
        write(args.json, result, missing)
    for name, kernels in result.items():
        print(f"{name}: bytes spilled a thread, bytes of shared memory a program; not run, not timed")
        table = [(*(k[c] for c in COLUMNS), *bound(k), f"{k['operation']}: {k['shape']}") for k in kernels]
        print(format_table((*COLUMNS, "at most", "limit", "first launched by"), table))
        for kernel in kernels:
            for fault in kernel["faults"]:
                print(f"{kernel['kernel']} ({kernel['operation']}: {kernel['shape']}) {fault}")
        for reason in missing[name]:
            print(f"not compiled: {reason}")
        print()


def bound(kernel: dict[str, Any]) -> tuple[str, str]:
    share = kernel["bound"]["tensor_share"]
    return "" if share is None else f"{share:.0%}", kernel["bound"]["limit"]


def write(path: str, result: dict[str, Any], missing: dict[str, list[str]]) -> None:
    versions = environment(torch.device("cpu"), torch.bfloat16, 1)["versions"]
    note = "compiled without a GPU: nothing was run or timed; bound: from SASS, not measured"
    about = {"versions": versions, "measured_on": None, "note": note}
    write_json(path, {**about, "kernels": result, "not_compiled": missing})


if __name__ == "__main__":
    run(main)
