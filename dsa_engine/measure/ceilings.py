"""Measured peak rates of a device: a large matrix product and a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.testing import do_bench


@dataclass(frozen=True)
class Ceilings:
    """Peak rates, measured within a fraction of a second in the process whose results are compared with them."""

    flops_per_s: float  # a large matrix product in the run's dtype
    bytes_per_s: float  # a large copy, bytes read plus bytes written

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        size, length = (8192, 1 << 30) if device.type == "cuda" else (1024, 64 << 20)
        if device.type == "cuda":  # an engine's caches may leave little
            length = min(length, torch.cuda.mem_get_info(device)[0] // 4)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        source = torch.randint(0, 255, (length,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return cls(
            flops_per_s=2 * size**3 / seconds(lambda: a @ b, device),
            bytes_per_s=2 * length / seconds(lambda: target.copy_(source), device),
        )

    def to_json(self) -> dict[str, float]:
        return {"matmul_tflops_per_s": self.flops_per_s / 1e12, "copy_gb_per_s": self.bytes_per_s / 1e9}


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call: on CUDA by events, with the L2 cache cleared before each call; on a CPU by the wall clock,
    of three calls, or fewer if they are long."""
    if device.type == "cuda":
        return do_bench(run, warmup=20, rep=80, return_mode="median") / 1e3
    run()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
        if sum(times) > 0.1:
            break
    return statistics.median(times)
