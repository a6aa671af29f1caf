"""Measured peak rates of a device: multiply-adds and a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsa_engine.kernels.runtime import cpu, libraries

_BURSTS, _STEPS = 40, 1 << 17  # 40 times some 0.25 ms
_LANES = 16  # of the widest vectors
_L2_BYTES = 256 << 20  # more than any L2 cache: read before each call on CUDA
_MEASURED_S = 0.05


@dataclass(frozen=True)
class Ceilings:
    """Peak rates, measured within a fraction of a second in the process whose results are compared with them."""

    # No product is faster: a large matrix product in the run's dtype, or on a CPU multiply-adds from registers to
    # registers on all threads, if they are faster.
    flops_per_s: float
    bytes_per_s: float  # a large copy, bytes read plus bytes written
    matmul_flops_per_s: float | None = None  # the large matrix product alone; None: as flops_per_s

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        size, length = (8192, 1 << 30) if device.type == "cuda" else (1024, 64 << 20)
        if device.type == "cuda":  # an engine's caches may leave little
            length = min(length, torch.cuda.mem_get_info(device)[0] // 4)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        source = torch.randint(0, 255, (length,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        product = 2 * size**3 / seconds(lambda: a @ b, device)
        copied = 2 * length / seconds(lambda: target.copy_(source), device)
        return cls(product, copied, product).raised(device)

    def raised(self, device: torch.device) -> Ceilings:
        """With the rate of multiply-adds measured again, on a CPU: it is the higher one of both times, as a core that
        was interrupted, or ran slower, has shown less than it can do."""
        if device.type == "cuda":
            return self
        return replace(self, flops_per_s=max(self.flops_per_s, multiply_adds_per_s()))

    def to_json(self) -> dict[str, float]:
        return {
            "peak_tflops_per_s": self.flops_per_s / 1e12,
            "matmul_tflops_per_s": (self.matmul_flops_per_s or self.flops_per_s) / 1e12,
            "copy_gb_per_s": self.bytes_per_s / 1e9,
        }


def multiply_adds_per_s() -> float:
    """Float32 operations per second of all threads, two for a multiply-add, if each thread is as fast as one alone; 0
    without the CPU's kernels. The fastest of short bursts, which other processes do not interrupt."""
    if cpu.library() is None:
        return 0.0
    values, fastest = torch.ones(_LANES), 0.0
    for _ in range(_BURSTS):
        begin = time.perf_counter()
        made = cpu.kernels().dsa_multiply_adds(values.data_ptr(), _STEPS)
        fastest = max(fastest, made / (time.perf_counter() - begin))
    return fastest * torch.get_num_threads()


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call: on CUDA by events, with the L2 cache cleared before each call; on a CPU by the wall clock,
    of three calls, or fewer if they are long."""
    times: list[float] = []
    if device.type == "cuda":
        # Reading clears it too; lines that were written would be stored to memory under the measured call.
        cache = torch.zeros(_L2_BYTES // 4, device=device)
        while len(times) < 5 or (len(times) < 100 and sum(times) < _MEASURED_S):
            times.append(libraries.milliseconds(run, 1, cache.sum) / 1e3)
        return statistics.median(times)
    run()
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
        if sum(times) > 0.1:
            break
    return statistics.median(times)
