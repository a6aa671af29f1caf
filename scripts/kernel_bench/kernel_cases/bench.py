"""Timing of kernels, beside the ceilings of the device and alternatives from other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_engine.kernels.runtime.error_line import error_line
from dsa_engine.measure.ceilings import Ceilings, seconds

Call = Callable[[], Any]


@dataclass(frozen=True)
class KernelCase:
    """One operation at one size, with its inputs."""

    kernel: str
    shape: str
    run: Call
    flops: float  # required floating-point operations
    bytes: float  # minimum bytes to move: every input read once, every output written once
    baselines: Mapping[str, Call] = field(default_factory=dict)  # the same result by other means
    product: bool = False  # tensor-core work, compared with a matrix product; otherwise with a copy
    needs: int = 0  # compute capability below which no GPU has the instructions


def measure(case: KernelCase, ceilings: Ceilings, device: torch.device) -> dict[str, Any]:
    """Times a case and its baselines; for a baseline that cannot run, the result has the reason."""
    taken = seconds(case.run, device)
    best = case.flops / ceilings.flops_per_s if case.product else case.bytes / ceilings.bytes_per_s
    result: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": case.shape,
        "ms": taken * 1e3,
        "tflops_per_s": case.flops / taken / 1e12,
        "gb_per_s": case.bytes / taken / 1e9,
        "ceiling": "matmul" if case.product else "copy",
        "share_of_ceiling": best / taken,
        "baselines": {},
    }
    for name, run in case.baselines.items():
        try:
            other = seconds(run, device)
            result["baselines"][name] = {"ms": other * 1e3, "times_ours": other / taken}
        except Exception as error:  # an error of another library must not end the run; it is part of the result
            result["baselines"][name] = {"skipped": error_line(error, 100)}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def rows(results: Iterable[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """Rows of a table for people: kernel, shape, ms, rate, fraction of the ceiling, times of the baselines over
    ours."""
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
