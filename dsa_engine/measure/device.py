"""The device that measures: its peak memory, and whether a kernel has left it in an error."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: forgets the peak of the resident set


def reset_peak(device: torch.device) -> None:
    """Makes :func:`peak_bytes` count from now on; without effect on a CPU that is not Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: device memory on CUDA, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _CLEAR_REFS.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_lost(device: torch.device) -> bool:
    """Whether a kernel has left the device in an error: this process can no longer run anything on it, another can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
