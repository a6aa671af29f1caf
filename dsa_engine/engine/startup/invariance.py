"""What ``batch_invariant`` cannot promise, refused before anything is loaded."""

from __future__ import annotations

import torch

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.options import EngineOptions


def refuse_variant(options: EngineOptions, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses, with ``batch_invariant``, what computes a row by what runs beside it."""
    if not options.batch_invariant:
        return
    parallel, speculation = options.parallel, options.speculation
    on_cpu = device.type == "cpu" and not INTERPRETED
    refused = {
        'kernels "reference"': (options.kernels == "reference", "PyTorch's products add by the number of rows"),
        'moe_combine_dtype "fp8"': (parallel.moe_combine_dtype == "fp8", "only sums that travel are rounded to it"),
        "speculative_config relaxed_topk": (
            speculation is not None and speculation.relaxed_topk > 0,
            "drafts choose tokens, and how many there are follows from the batch",
        ),
        f"dtype {str(dtype).removeprefix('torch.')!r} on a CPU": (
            on_cpu and dtype not in cpu.TYPES,
            f"its kernels take {', '.join(str(one) for one in cpu.TYPES)}",
        ),
        "a CPU without its compiled kernels": (
            on_cpu and cpu.library() is None,
            "PyTorch's products add by the number of rows; install a C++ compiler, and do not set DSA_ENGINE_NATIVE=0",
        ),
    }
    for what, (given, why) in refused.items():
        if given:
            raise ValueError(
                f"batch_invariant does not go with {what}: {why}; change that, or leave batch_invariant out"
            )
