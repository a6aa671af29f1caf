"""Whether a kernel has left the device in an error, of which no call of this process can rid it."""

from __future__ import annotations

import subprocess
import sys

import torch


def is_lost(device: torch.device) -> bool:
    """Whether nothing runs on the device any more in this process; another process may use it."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def in_another_process(*options: str) -> int:
    """Runs this script once more, with further options behind those that it was given.

    Returns:
        its exit status, or 1 where that is 0: this process has failed.
    """
    sys.stdout.flush()
    return subprocess.call([sys.executable, *sys.argv, *options]) or 1
