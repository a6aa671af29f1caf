"""The device that measures: its peak memory, and whether a kernel has left it in an error."""

from __future__ import annotations

import torch

from dsa_engine.system.sizes import peak_resident_bytes, reset_peak_resident


def reset_peak(device: torch.device) -> None:
    """Makes :func:`peak_bytes` count from now on; without effect on a CPU that is not Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_resident()


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: device memory on CUDA, resident set on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def is_lost(device: torch.device) -> bool:
    """Whether a kernel has left the device in an error: this process can no longer run anything on it, another can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
