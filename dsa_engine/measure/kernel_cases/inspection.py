"""Compiling every kernel at its production sizes for a chip that need not be there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dsa_engine.kernels.compile_only import compile_only
from dsa_engine.measure.kernel_cases.cases import CASES
from dsa_engine.measure.kernel_cases.inputs import Inputs, Sizes

# Most shared memory that a program may use, in bytes, by compute capability (CUDA programming guide, table of
# technical specifications).
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def inspect(capability: int, names: Iterable[str] = tuple(CASES)) -> list[dict[str, Any]]:
    """Compiles the kernels of the named cases for ``sm_<capability>``.

    Returns:
        for every compiled kernel, once: the case and shape that first launched it, its grid there, and the fields of
        :class:`~dsa_engine.kernels.compile_only.Resources`. Cases that need a later chip are left out.
    """
    make = Inputs(torch.device("cpu"), torch.bfloat16, untouched=True)
    found: dict[str, dict[str, Any]] = {}
    with compile_only(capability) as launches:
        for name in names:
            for case in CASES[name](make, Sizes()):
                if capability < case.needs:
                    continue
                launches.clear()
                case.run()
                for launch in launches:
                    if launch.kernel.hash not in found:
                        found[launch.kernel.hash] = {
                            "case": name,
                            "operation": case.kernel,
                            "shape": case.shape,
                            "product": case.product,
                            "kernel": launch.name,
                            "grid": list(launch.grid),
                            **launch.resources()._asdict(),
                        }
    return list(found.values())


def faults(kernel: dict[str, Any], capability: int) -> list[str]:
    """What keeps a kernel from running well on the chip, a sentence each; empty if nothing."""
    found = []
    if kernel["spilled"]:
        found.append(f"spills {kernel['spilled']} bytes a thread")
    limit = SHARED_LIMIT[capability]
    if kernel["shared"] > limit:
        found.append(f"needs {kernel['shared']:,} bytes of shared memory, a program has {limit:,}")
    if capability == 90 and kernel["product"] and kernel["mma"] and not kernel["wgmma"]:
        found.append("multiplies with mma.sync instead of wgmma")
    return found
