"""Whether a kernel has left the device in an error, of which no call of this process can rid it."""

from __future__ import annotations

import torch


def is_lost(device: torch.device) -> bool:
    """Whether nothing runs on the device any more in this process; another process may use it."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
