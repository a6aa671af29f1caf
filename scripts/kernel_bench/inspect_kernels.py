"""Compiles every kernel at production sizes without a GPU; shows its registers, spills, shared memory and products.

Nothing is run or timed. A kernel has a line for each way in which it is compiled, with the first case that launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from compile_only import Resources, compile_only, resources
from dsa_engine.commands.arguments import argument_parser, run
from dsa_engine.kernels.runtime.operation import error_line
from dsa_engine.measure.report import format_table
from dsa_engine.system.progress import progress_bar
from kernel_cases import CASES, named
from kernel_cases.inputs import Inputs, KernelCase, Sizes

# Maximum shared memory of a program, in bytes, by compute capability (CUDA programming guide, table of
# technical specifications).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Inspection(NamedTuple):
    """The kernels of a chip, each once with the first case that launched it, and a sentence for each case that does not
    compile."""

    kernels: list[tuple[Resources, KernelCase]]
    missing: list[str]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--target", type=int, nargs="+", default=[90], choices=sorted(SHARED_LIMIT), help="compute capabilities"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(CASES)}")
    args = parser.parse_args()
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
