"""Timing of a kernel, beside the ceilings of the device, its PyTorch reference and other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.operation import error_line
from dsa_engine.measure.ceilings import Ceilings, seconds
from kernel_cases.inputs import KernelCase


def measure(case: KernelCase, ceilings: Ceilings, device: torch.device) -> dict[str, Any]:
    """Times a case and what it is compared with; for what cannot run, the result has the reason."""
    taken = seconds(case.run, device)
    best = case.flops / ceilings.flops_per_s if case.product else case.bytes / ceilings.bytes_per_s
    others: dict[str, Any] = {}
    for name, call in {"reference": referenced(case.run), **case.baselines}.items():
        try:
            other = seconds(call, device)
            others[name] = {"ms": other * 1e3, "times_ours": other / taken}
        except Exception as error:  # an error of another library must not end the run; it is part of the result
            others[name] = {"skipped": error_line(error, 100)}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "ms": taken * 1e3,
        "tflops_per_s": case.flops / taken / 1e12,
        "gb_per_s": case.bytes / taken / 1e9,
        "ceiling": "matmul" if case.product else "copy",
        "share_of_ceiling": best / taken,
        "baselines": others,
    }


def referenced(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with the PyTorch references of the operations in it."""

    def run_references() -> None:
        with launch.references():
            call()

    return run_references


def rows(results: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Rows of a table for people: kernel, shape, ms, rate, fraction of the ceiling, times of the others over ours."""
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
