"""Copies between host and device without waiting: a copy runs after the earlier work of the device.

A copy from ordinary memory makes the host wait until the device has done everything before it. From and to pinned
memory it does not; PyTorch keeps such memory alive until the copy is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def upload(values: torch.Tensor, device: torch.device | str, out: torch.Tensor | None = None) -> torch.Tensor:
    """``values``, a CPU tensor, on ``device``, for the work that is given to the current stream from now on.

    With ``out``, a tensor there, they are written to it, once the work before no longer reads it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True) if out is None else out.copy_(values, non_blocking=True)


def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to bring ``values`` to the host.

    Returns:
        a function that waits for them, but for nothing later, and returns them as a CPU tensor.
    """
    if values.device.type != "cuda":
        return lambda: values
    copy = values.to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))

    def read() -> torch.Tensor:
        done.synchronize()
        return copy

    return read


def download(values: torch.Tensor) -> Callable[[], list[Any]]:
    """Like :func:`to_host`; the values come as nested lists."""
    read = to_host(values)
    return lambda: read().tolist()
