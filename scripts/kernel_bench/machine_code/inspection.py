"""Compilation of every kernel at its production sizes, for a chip that need not be present."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from dsa_engine.kernels.runtime.compile_only import Launch, compile_only
from dsa_engine.kernels.runtime.error_line import error_line
from kernel_cases.bench import KernelCase
from kernel_cases.cases import CASES
from kernel_cases.inputs import Inputs, Sizes
from machine_code.ceiling import upper_bound
from machine_code.loop_bound import loop_bound

# Maximum shared memory of a program, in bytes, by compute capability (CUDA programming guide, table of
# technical specifications).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Inspection(NamedTuple):
    """The compiled kernels of a chip.

    Attributes:
        kernels: every compiled kernel once: the case and shape that first launched it, its grid there, the fields of
            :class:`~dsa_engine.kernels.runtime.compile_only.Resources`, as "bound" what :func:`.loop_bound` says, and
            as "at_most" what :func:`.at_most` says for the cases that launch it: the operation and the shapes.
        missing: a sentence for each operation that cannot be compiled.
    """

    kernels: list[dict[str, Any]]
    missing: list[str]


def inspect(
    capability: int, names: Iterable[str] = tuple(CASES), done: Callable[[], object] = lambda: None
) -> Inspection:
    """Compiles the kernels of the named cases for ``sm_<capability>``; calls ``done`` after each name."""
    make = Inputs(torch.device("cpu"), torch.bfloat16, untouched=True)
    compiled: dict[str, dict[str, Any]] = {}
    missing: dict[str, None] = {}
    with compile_only(capability) as launches:
        for name in names:
            for case in CASES[name](make, Sizes()):
                if capability < case.needs:
                    missing[f"{case.kernel}: needs instructions of sm_{case.needs}"] = None
                    continue
                launches.clear()
                try:
                    case.run()
                except Exception as error:  # a compiler's error of any type
                    missing[f"{case.kernel}: {case.shape}: {error_line(error)}"] = None
                about = {"case": name, "operation": case.kernel, "shape": case.shape, "product": case.product}
                for launch in launches:
                    if launch.kernel.hash not in compiled:
                        compiled[launch.kernel.hash] = about | _of(launch, capability)
                    _judge(compiled[launch.kernel.hash], case, capability)
            done()
    return Inspection(list(compiled.values()), list(missing))


def _judge(kernel: dict[str, Any], case: KernelCase, capability: int) -> None:
    judged = {"operation": case.kernel, **upper_bound(kernel["bound"], case.flops, case.bytes, capability)}
    for before in kernel["at_most"]:
        if judged == {name: value for name, value in before.items() if name != "shapes"}:
            before["shapes"] += [case.shape] if case.shape not in before["shapes"] else []
            return
    kernel["at_most"].append(judged | {"shapes": [case.shape]})


def _of(launch: Launch, capability: int) -> dict[str, Any]:
    sass = launch.sass()
    resources = launch.resources(sass)
    return {
        "kernel": launch.name,
        "grid": list(launch.grid),
        **resources._asdict(),
        "bound": loop_bound(sass, resources.warps, capability),
        "at_most": [],
    }


def faults(kernel: dict[str, Any], capability: int) -> list[str]:
    """Problems of a kernel on the chip, a sentence each."""
    problems = []
    if kernel["spilled"]:
        where = "" if kernel["bound"]["spills"] else ", outside of its inner loop"
        problems.append(f"spills {kernel['spilled']} bytes a thread{where}")
    limit = SHARED_LIMIT[capability]
    if kernel["shared"] > limit:
        problems.append(f"needs {kernel['shared']:,} bytes of shared memory, a program has {limit:,}")
    if capability == 90 and kernel["product"] and kernel["mma"] and not kernel["wgmma"]:
        problems.append("multiplies with mma.sync instead of wgmma")
    return problems
