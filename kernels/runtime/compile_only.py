"""Compiling kernels for a chip that is not installed.

Within :func:`compile_only`, the public functions of this package take CPU tensors and do all that they would do for
CUDA tensors, but every launch ends with the compiled kernel: nothing runs, and results stay as they were allocated. So
the launch parameters, the specialisation of arguments and the choice of configuration are the real ones, and no second
list of signatures can differ from them. Tensors of production size cost nothing as long as their pages are not touched
(``torch.empty``).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dsa_engine.kernels.runtime.launch import INTERPRETED, compiling_for


class Resources(NamedTuple):
    """Resources of a compiled kernel on the chip, and counts of its instructions."""

    warps: int
    registers: int  # a thread
    spilled: int  # bytes of stack a thread
    shared: int  # bytes a program
    wgmma: int  # warpgroup products: Hopper's tensor cores at full rate
    warpgroup_waits: int  # where warps meet around warpgroup products; many mean that products run one after another
    mma: int  # products by a single warp: mma.sync
    tcgen05: int  # Blackwell's products
    fp8: int  # those of all these products with e4m3 operands
    loads_16: int  # loads of 16 bytes a thread, plain or asynchronous


def _cuobjdump(option: str, cubin: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Launch(NamedTuple):
    """One launch that would have happened."""

    name: str
    grid: tuple[int, int, int]
    kernel: Any  # triton.compiler.CompiledKernel: its .asm["ptx"], .asm["cubin"] and .metadata

    def sass(self) -> str:
        """The binary's machine code."""
        return self._dump("-sass")

    def _dump(self, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            return _cuobjdump(option, file.name)

    def resources(self, sass: str) -> Resources:
        """Resources from the binary (with the cuobjdump of the Triton package), its machine code and the PTX."""
        ptx = self.kernel.asm["ptx"]
        usage = dict(re.findall(r"(REG|STACK):(\d+)", self._dump("-res-usage")))
        return Resources(
            warps=self.kernel.metadata.num_warps,
            registers=int(usage["REG"]),
            spilled=int(usage["STACK"]),
            shared=self.kernel.metadata.shared,
            wgmma=ptx.count("wgmma.mma_async"),
            mma=ptx.count("mma.sync.aligned"),
            warpgroup_waits=len(re.findall(r"\bWARPGROUP\.", sass)),
            tcgen05=len(re.findall(r"tcgen05\.mma", ptx)),
            fp8=len(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[\w.:]*e4m3|tcgen05\.mma[\w.:]*f8f6f4", ptx)),
            loads_16=len(
                re.findall(r"ld\.global[.\w]*\.v4\.[bfu]32|ld\.global[.\w]*\.v2\.[bfu]64|cp\.async\.cg\.[^;]*0x10", ptx)
            ),
        )


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # compiled whatever it takes: the report checks the limits

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, largest number of threads


class _Driver:
    """The part of a Triton driver that a launch needs; one for each chip, since kernels keep their launchers."""

    utils = _Utils()

    def __init__(self, capability: int):
        self.launches: list[Launch] = []
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device number: one for each chip, and none that a real device has.
        return 1_000 + self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        compiled = source.fn.device_caches[self.get_current_device()][0].values()
        kernel = next(k for k in compiled if k.hash == metadata.hash)

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            self.launches.append(Launch(metadata.name, (x, y, z), kernel))

        return launch


_driver_for = cache(_Driver)


@contextmanager
def compile_only(capability: int) -> Iterator[list[Launch]]:
    """Operations on CPU tensors compile their kernels for ``sm_<capability>`` and launch nothing.

    Yields:
        the list to which every launch is added, empty at first.

    Raises:
        RuntimeError: under ``TRITON_INTERPRET=1``, where no kernel can be compiled.
    """
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET=1; unset it")
    compiler = _driver_for(capability)
    compiler.launches.clear()
    try:
        before = driver.active
    except RuntimeError:  # no device: Triton has no driver
        before = None
    driver.set_active(compiler)
    try:
        with compiling_for(capability):
            yield compiler.launches
    finally:
        driver.set_active(before)
