"""The most memory that a process has held."""

from __future__ import annotations

import ctypes
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


def give_back_free_memory() -> None:
    """Makes the C library give memory that nobody uses back to the system, so that on a CPU what a call adds to the
    resident set does not depend on what ran before; without effect where the library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_bytes(device: torch.device) -> int:
    """Most memory that this process has held: device memory on CUDA, resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _CLEAR_REFS.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
