"""Compiling kernels for a chip that is not installed.

Within :func:`compile_only`, the operations take CPU tensors and do all that they would do for CUDA tensors, but every
launch ends with the compiled kernel: nothing runs, and results stay as they were allocated. So the launch parameters,
the specialisation of arguments and the choice of configuration are the real ones. Tensors of production size cost
nothing as long as their pages are not touched (``torch.empty``).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]  # torch needs it
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from dsa_engine.kernels.runtime.launch import INTERPRETED, compiling_for

_LOOP = 16  # instructions; a loop of fewer only waits


class Resources(NamedTuple):
    """What a compiled kernel takes on the chip, and the products among its instructions."""

    kernel: str
    warps: int
    registers: int  # a thread
    spilled: int  # bytes of stack a thread
    looped: int  # instructions in innermost loops that read or write the stack
    shared: int  # bytes a program
    wgmma: int  # warpgroup products: Hopper's tensor cores at full rate
    mma: int  # other products: mma.sync by a single warp, and Blackwell's tcgen05
    fp8: int  # those of all these products with e4m3 operands


def resources(kernel: Any) -> Resources:
    """The resources of a ``triton.compiler.CompiledKernel``. Without a GPU Triton knows neither registers nor spills:
    they are from the binary, by the cuobjdump in the Triton package."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def read(*options: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = dict(re.findall(r"(REG|STACK):(\d+)", read("-res-usage")))
        looped = spills_in_loops(read("-sass")) if int(usage["STACK"]) else 0
    products = re.findall(r"(?:wgmma\.mma_async|mma\.sync\.aligned|tcgen05\.mma)[\w.:]*", ptx)
    wgmma = sum(product.startswith("wgmma") for product in products)
    fp8 = sum("e4m3" in product or "f8f6f4" in product for product in products)
    registers, spilled, about = int(usage["REG"]), int(usage["STACK"]), kernel.metadata
    resources = about.name, about.num_warps, registers, spilled, looped, about.shared, wgmma
    return Resources(*resources, len(products) - wgmma, fp8)


def spills_in_loops(sass: str) -> int:
    """Number of instructions in innermost loops that read or write the stack, of machine code as cuobjdump prints it.
    Loops that only wait, for a barrier, do not count."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass)
    code = {int(address, 16): text for address, text in lines}
    flow = networkx.DiGraph()
    for address, then in zip(code, [*code][1:], strict=False):
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)$", code[address])
        if target:
            flow.add_edge(address, int(target[1], 16))
        if not re.match(r"(BRA 0x|EXIT|RET)", code[address]):  # without a condition
            flow.add_edge(address, then)

    def innermost(part: Any) -> Iterator[set[int]]:
        for loop in networkx.strongly_connected_components(part):
            if len(loop) >= _LOOP:
                yield from list(innermost(part.subgraph(loop - {min(loop)}))) or [loop]

    return sum(re.search(r"\b(STL|LDL)\b", code[address]) is not None for loop in innermost(flow) for address in loop)


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # compiled whatever it takes: the report checks the limits

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024  # module, function, registers, spills, largest number of threads


class _Driver:
    """The part of a Triton driver that a launch needs; one for each chip, since kernels keep their launchers."""

    utils = _Utils()

    def __init__(self, capability: int):
        self.launched: list[Any] = []
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
        return lambda *_: self.launched.append(kernel)


_driver_for = cache(_Driver)


@contextmanager
def compile_only(capability: int) -> Iterator[list[Any]]:
    """Operations on CPU tensors compile their kernels for ``sm_<capability>`` and launch nothing.

    Yields:
        the list to which every launch adds its kernel, a ``triton.compiler.CompiledKernel``; empty at first.

    Raises:
        RuntimeError: under ``TRITON_INTERPRET=1``, where no kernel can be compiled.
    """
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET=1; unset it")
    compiler = _driver_for(capability)
    compiler.launched.clear()
    try:
        before = driver.active
    except RuntimeError:  # no device: Triton has no driver
        before = None
    driver.set_active(compiler)
    try:
        with compiling_for(capability):
            yield compiler.launched
    finally:
        driver.set_active(before)
