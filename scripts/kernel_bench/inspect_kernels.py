"""Compiles every kernel at production sizes without a GPU; shows its registers, spills, shared memory and products.

Nothing is run or timed. A kernel has a line for each way in which it is compiled, with the first case that launches it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from compile_only import Resources, compile_only, resources
from dsa_engine.commands.arguments import argument_parser, run
from dsa_engine.kernels.runtime.operation import error_line
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.system.progress import progress_bar
from kernel_cases.cases import CASES, named
from kernel_cases.inputs import Inputs, KernelCase, Sizes

# Maximum shared memory of a program, in bytes, by compute capability (CUDA programming guide, table of
# technical specifications).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Inspection(NamedTuple):
    """The kernels of a chip, each once with the first case that launched it, and a sentence for each case that does not
    compile."""

    kernels: list[tuple[Resources, KernelCase]]
    missing: list[str]


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--target", type=int, nargs="+", default=[90], choices=sorted(SHARED_LIMIT), help="compute capabilities"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(CASES)}")
    parser.add_argument(
        "--json", metavar="PATH", help="put what is counted in this file, beside other versions of Triton"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = named(args.only)
    for target in args.target:
        with progress_bar(len(names), "cases", f"compiling for sm_{target}") as bar:
            kernels, missing = inspect(target, names, bar.update)
        print(f"sm_{target}: bytes spilled a thread, uses of them in innermost loops, bytes of shared memory; not run")
        lines = [(*compiled, f"{case.kernel}: {case.shape}") for compiled, case in kernels]
        print(format_table((*Resources._fields, "first launched by"), lines))
        for compiled, case in kernels:
            for fault in faults(compiled, case.product, target):
                print(f"{compiled.kernel} ({case.kernel}: {case.shape}) {fault}")
        print(*(f"not compiled: {reason}" for reason in missing), sep="\n")
        if args.json:
            add_counts(Path(args.json), target, Inspection(kernels, missing))


def add_counts(path: Path, target: int, seen: Inspection) -> None:
    """Adds the sums of a chip to a file with those of other chips and versions of Triton."""
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"triton": {}}
    spilling = [(one, case) for one, case in seen.kernels if one.spilled]
    report["triton"].setdefault(triton.__version__, {})[f"sm_{target}"] = {
        "kernels": len(seen.kernels),
        "not_compiled": seen.missing,
        "registers": max(one.registers for one, _ in seen.kernels),
        "shared": max(one.shared for one, _ in seen.kernels),
        "shared_limit": SHARED_LIMIT[target],
        "spill": [
            {"kernel": one.kernel, "case": f"{case.kernel}: {case.shape}", "bytes": one.spilled, "in_loop": one.looped}
            for one, case in spilling
        ],
    }
    write_json(path, report)


def inspect(
    capability: int, names: Iterable[str] = tuple(CASES), done: Callable[[], object] = lambda: None
) -> Inspection:
    """Compiles the kernels of the named cases for ``sm_<capability>``; calls ``done`` after each name."""
    make = Inputs(torch.device("cpu"), torch.bfloat16, untouched=True)
    compiled: dict[str, tuple[Resources, KernelCase]] = {}
    missing: dict[str, None] = {}
    with compile_only(capability) as launched:
        for name in names:
            for case in CASES[name](make, Sizes()):
                if capability < case.needs:
                    missing[f"{case.kernel}: needs instructions of sm_{case.needs}"] = None
                    continue
                launched.clear()
                try:
                    case.run()
                except Exception as error:  # a compiler's error of any type
                    missing[f"{case.kernel}: {case.shape}: {error_line(error)}"] = None
                for kernel in launched:
                    if kernel.hash not in compiled:
                        compiled[kernel.hash] = resources(kernel), case
            done()
    return Inspection(list(compiled.values()), list(missing))


def faults(kernel: Resources, product: bool, capability: int) -> list[str]:
    """Problems of a kernel on the chip, a sentence each; ``product``: it ought to multiply at full rate."""
    problems = []
    if kernel.spilled:
        problems.append(f"spills {kernel.spilled} bytes a thread" + ", in a loop" * (kernel.looped > 0))
    limit = SHARED_LIMIT[capability]
    if kernel.shared > limit:
        problems.append(f"needs {kernel.shared:,} bytes of shared memory, a program has {limit:,}")
    if capability == 90 and product and kernel.mma and not kernel.wgmma:
        problems.append("multiplies with mma.sync instead of wgmma")
    return problems


if __name__ == "__main__":
    run(main)
