"""What the host gives to a fake device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """Something that the device is to do."""

    kind: str  # "torch", "triton", "collective", "copy" (from the host), "graph" (a replay of many)
    name: str
    dtypes: tuple[torch.dtype, ...] = ()  # of the tensors that a matrix product of PyTorch's multiplies


class Capture(NamedTuple):
    """A CUDA graph that was captured."""

    stream: int  # which stream it was captured on: different ones have different numbers
    pool: tuple[int, int] | None  # where its memory lies
    launches: list[Launch]  # what it holds
    warmed_up: bool  # whether the stream had been given something before, outside of a graph
