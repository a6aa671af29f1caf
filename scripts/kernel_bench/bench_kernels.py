"""Measures every kernel at production sizes, beside the device's ceilings and alternatives from other libraries.

If a kernel leaves the device in an error, another process measures the other kernels.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.config.model import DTYPES
from dsa_engine.kernels.runtime.error_line import error_line
from dsa_engine.kernels.runtime.launch import capability
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.device import in_another_process, is_lost
from dsa_engine.measure.report import environment, format_table, read_so_far, write_so_far
from dsa_engine.system.output_files import check_outputs
from kernel_cases.bench import KernelCase, measure, rows
from kernel_cases.cases import CASES, named
from kernel_cases.inputs import Inputs, Sizes


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(CASES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"), help="device of the kernels")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="dtype of activations and caches")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script on a CPU")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no further case after this long")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")
    add_json_argument(parser)
    parser.add_argument("--add", action="store_true", help="keep what the file of --json holds, and add to it")
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = named(args.only)
    check_outputs(args.json)
    if args.device == "cpu" and not args.small:
        raise ValueError("production sizes are for a GPU; add --small to try the script on a CPU")
    if args.add and (not args.json or args.json == "-"):
        raise ValueError("--add adds to the file that --json names; name one")
    bench = Bench(args)
    for i, name in enumerate(names):
        if args.time_limit and time.perf_counter() - bench.begin > args.time_limit:
            bench.left_out += names[i:]
            break
        bench.measure(name)
        bench.write(complete=False)
        if is_lost(bench.device):
            sys.exit(bench.go_on(names[i + 1 :]))
    bench.write(complete=True)
    if bench.left_out:
        print(f"left out for lack of time: {', '.join(bench.left_out)}")
    for what, reason in bench.failed.items():
        print(f"FAILED {what}: {reason}")
    if bench.failed:
        sys.exit(1)


class Bench:
    """The results so far."""

    def __init__(self, args: argparse.Namespace):
        self.begin = time.perf_counter()
        self.device, dtype = torch.device(args.device), DTYPES[args.dtype]
        self.left_out: list[str] = []
        self.failed: dict[str, str] = {}
        self._args, self._dtype = args, dtype
        self._sizes = Sizes.small() if args.small else Sizes()
        self._where = environment(self.device, dtype, 1)
        self._results: list[dict[str, Any]] = []
        if args.add:
            self._results, self.failed = read_so_far(args.json)
        self._ceilings = Ceilings.measure(self.device, dtype)
        print(
            f"ceilings: {self._ceilings.flops_per_s / 1e12:.4g} TFLOP/s ({args.dtype} products), "
            f"{self._ceilings.bytes_per_s / 1e9:.4g} GB/s (copy, read plus written)"
        )

    def measure(self, name: str) -> None:
        """Measures all cases of one name. A kernel's failure is reported and does not affect the others."""
        measured: list[dict[str, Any]] = []
        try:
            for case in CASES[name](Inputs(self.device, self._dtype, seed=self._args.seed), self._sizes):
                if not self._measure(case, measured):
                    break
        except Exception as error:  # such as inputs that do not fit
            self._fail(name, error)
        print(format_table(("kernel", "shape", "ms", "rate", "share", "others' time over ours"), rows(measured)), "\n")
        self._results += measured

    def _measure(self, case: KernelCase, measured: list[dict[str, Any]]) -> bool:
        """Measures one case; returns whether the device still works."""
        device = self.device
        if device.type == "cuda" and capability(torch.empty(0, device=device)) < case.needs:
            print(f"{case.kernel}: left out, it needs compute capability {case.needs / 10:g}")
            return True
        what = f"{case.kernel}: {case.shape}"
        try:
            measured.append(measure(case, self._ceilings, device))
            if not is_lost(device):
                return True
            raise RuntimeError("something that it is compared with has left the device in an error")
        except Exception as error:
            self._fail(what, error)
        return not is_lost(device)

    def _fail(self, what: str, error: Exception) -> None:
        self.failed.pop(what, None)  # the latest failure is the last entry
        self.failed[what] = error_line(error)

    def write(self, complete: bool) -> None:
        about = {**self._where, "ceilings": self._ceilings.to_json(), "left_out": self.left_out, "failed": self.failed}
        write_so_far(self._args.json, about, self._results, complete=complete)

    def go_on(self, names: list[str]) -> int:
        """Measures the other kernels in another process; its exit status, or 1 at least."""
        args = self._args
        print(f"FAILED {list(self.failed)[-1]}: it has left the device in an error", flush=True)
        if not names or not args.json or args.json == "-":
            print(f"not measured: {', '.join(names) or 'none'}" + ("; name a file with --json" if names else ""))
            return 1
        options = ["--only", ",".join(names), "--add"]
        if args.time_limit:
            options += ["--time-limit", str(max(1.0, args.time_limit - (time.perf_counter() - self.begin)))]
        return in_another_process(*options)


if __name__ == "__main__":
    run(main)
