"""Measures every kernel at production sizes, beside the device's ceilings and what a user would otherwise call."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from dsa_engine.arguments import argument_parser, run
from dsa_engine.kernels.launch import capability
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.kernel_cases.bench import measure, rows
from dsa_engine.measure.kernel_cases.cases import CASES, named
from dsa_engine.measure.kernel_cases.inputs import Inputs, Sizes
from dsa_engine.measure.report import environment, format_table, write_so_far
from dsa_engine.model.config import DTYPES
from dsa_engine.output_files import check_outputs


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(CASES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"), help="where they run")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="of activations and caches")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script on a CPU")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no further case after this long")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = named(args.only)
    check_outputs(args.json)
    if args.device == "cpu" and not args.small:
        raise ValueError("production sizes are for a GPU; add --small to try the script on a CPU")
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    sizes = Sizes.small() if args.small else Sizes()
    begin = time.perf_counter()
    ceilings = Ceilings.measure(device, dtype)
    print(
        f"ceilings: {ceilings.flops_per_s / 1e12:.4g} TFLOP/s ({args.dtype} matrix product), "
        f"{ceilings.bytes_per_s / 1e9:.4g} GB/s (copy, read plus written)"
    )
    results: list[dict[str, Any]] = []
    left_out: list[str] = []
    failed: dict[str, str] = {}

    def write(complete: bool) -> None:
        about = {**where, "ceilings": ceilings.to_json(), "left_out": left_out, "failed": failed}
        write_so_far(args.json, about, results, complete=complete)

    where = environment(device, dtype, 1)
    for name in names:
        if args.time_limit and time.perf_counter() - begin > args.time_limit:
            left_out.append(name)
            continue
        measured = []
        for case in CASES[name](Inputs(device, dtype, seed=args.seed), sizes):
            if device.type == "cuda" and capability(torch.empty(0, device=device)) < case.needs:
                print(f"{case.kernel}: left out, it needs compute capability {case.needs / 10:g}")
                continue
            try:
                measured.append(measure(case, ceilings, device))
            except Exception as error:  # one kernel's failure is a finding, and must not take the others' figures along
                reason = (str(error).splitlines() or [""])[0]
                failed[f"{case.kernel}: {case.shape}"] = f"{type(error).__name__}: {reason:.200}"
        print(format_table(("kernel", "shape", "ms", "rate", "share", "others' time over ours"), rows(measured)), "\n")
        results += measured
        write(complete=False)
    write(complete=True)
    if left_out:
        print(f"left out for lack of time: {', '.join(left_out)}")
    for what, reason in failed.items():
        print(f"FAILED {what}: {reason}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
