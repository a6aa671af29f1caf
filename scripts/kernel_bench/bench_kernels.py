"""Measures every kernel at production sizes, beside the device's ceilings, its PyTorch reference and other libraries.

After an error from which the device does not recover, the other kernels are named: measure them with --only.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from dsa_engine.commands.arguments import add_json_argument, argument_parser, run
from dsa_engine.config.model import DTYPES
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.operation import error_line
from dsa_engine.measure.ceilings import Ceilings, seconds
from dsa_engine.measure.device import is_lost
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from kernel_cases import CASES, named
from kernel_cases.inputs import Inputs, KernelCase, Sizes, referenced


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(CASES)}")
    known = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=known, choices=("cuda", "cpu"), help="device of the kernels")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="dtype of activations and caches")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script on a CPU")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no further case after this long")
    add_json_argument(parser)
    args = parser.parse_args()
    names = named(args.only)
    check_outputs(args.json)
    if args.device == "cpu" and not args.small:
        raise ValueError("production sizes are for a GPU; add --small to try the script on a CPU")
    begin, device, dtype = time.perf_counter(), torch.device(args.device), DTYPES[args.dtype]
    ceilings = Ceilings.measure(device, dtype)
    print(
        f"ceilings: {ceilings.flops_per_s / 1e12:.4g} TFLOP/s ({args.dtype} products), "
        f"{ceilings.bytes_per_s / 1e9:.4g} GB/s (copy, read plus written)"
    )
    results: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    left_out: list[str] = []
    for i, name in enumerate(names):
        if is_lost(device) or (args.time_limit and time.perf_counter() - begin > args.time_limit):
            left_out = names[i:]
            break
        measured = measure_all(name, Inputs(device, dtype), args.small, ceilings, failed)
        print(format_table(("kernel", "shape", "ms", "rate", "share", "others' time over ours"), rows(measured)), "\n")
        results += measured
    if args.json:
        ended = {"ceilings": ceilings.to_json(), "left_out": left_out, "failed": failed, "results": results}
        write_json(args.json, environment(device, dtype, 1) | ended)
    if left_out:
        print(f"not measured: {', '.join(left_out)}")
    for what, reason in failed.items():
        print(f"FAILED {what}: {reason}")
    if failed:
        sys.exit(1)


def measure_all(
    name: str, make: Inputs, small: bool, ceilings: Ceilings, failed: dict[str, str]
) -> list[dict[str, Any]]:
    """Measures the cases of one name. A kernel's failure is noted in ``failed`` and does not affect the others."""
    measured: list[dict[str, Any]] = []
    what = name
    try:
        for case in CASES[name](make, Sizes.small() if small else Sizes()):
            what = f"{case.kernel}: {case.shape}"
            if make.device.type == "cuda" and launch.chip_of_device(make.device).capability < case.needs:
                print(f"{case.kernel}: left out, it needs compute capability {case.needs / 10:g}")
                continue
            try:
                measured.append(measure(case, ceilings, make.device))
            except Exception as error:
                failed[what] = error_line(error)
            if is_lost(make.device):
                failed.setdefault(what, "it, or what it is compared with, has left the device in an error")
                break
    except Exception as error:  # such as inputs that do not fit
        failed[name] = error_line(error)
    return measured


def measure(case: KernelCase, ceilings: Ceilings, device: torch.device) -> dict[str, Any]:
    """Times a case and what it is compared with; for what cannot run, the result has the reason."""
    taken = seconds(case.run, device)
    best = case.flops / ceilings.flops_per_s if case.product else case.bytes / ceilings.bytes_per_s
    others: dict[str, Any] = {}
    for name, call in {"reference": referenced(case.run), **case.baselines}.items():
        try:
            other = seconds(call, device)
            others[name] = {"ms": other * 1e3, "times_ours": other / taken}
        except Exception as error:  # an error of another library must not end the run; it is part of the result
            others[name] = {"skipped": error_line(error, 100)}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "ms": taken * 1e3,
        "tflops_per_s": case.flops / taken / 1e12,
        "gb_per_s": case.bytes / taken / 1e9,
        "ceiling": "matmul" if case.product else "copy",
        "share_of_ceiling": best / taken,
        "baselines": others,
    }


def rows(results: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Rows of a table for people: kernel, shape, ms, rate, fraction of the ceiling, times of the others over ours."""
    table: list[tuple[object, ...]] = []
    for r in results:
        product = r["ceiling"] == "matmul"
        rate = f"{r['tflops_per_s']:.4g} TFLOP/s" if product else f"{r['gb_per_s']:.4g} GB/s"
        others = ", ".join(
            f"{name} {b['times_ours']:.3g}x" if "times_ours" in b else f"{name}: {b['skipped']}"
            for name, b in r["baselines"].items()
        )
        table.append((r["kernel"], r["shape"], r["ms"], rate, f"{r['share_of_ceiling']:.1%} of {r['ceiling']}", others))
    return table


if __name__ == "__main__":
    run(main)
