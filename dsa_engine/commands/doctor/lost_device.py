"""Devices that a kernel has left in an error from which this process cannot recover."""

from __future__ import annotations

import subprocess
import sys

import torch


def is_lost(device: torch.device) -> bool:
    """Whether this process can no longer run anything on the device; another process can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def in_another_process(*options: str) -> int:
    """Runs this script once more, with ``options`` after those of this process.

    Returns:
        its exit status, or 1 instead of 0, as this process has failed.
    """
    sys.stdout.flush()
    return subprocess.call([sys.executable, *sys.argv, *options]) or 1
