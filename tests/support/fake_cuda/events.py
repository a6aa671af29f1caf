"""Launches and captured graphs of a fake device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


class Launch(NamedTuple):
    """A launch on the device."""

    kind: str  # "torch", "triton", "collective", "copy" (from the host), "graph" (a replay of many)
    name: str
    dtypes: tuple[torch.dtype, ...] = ()  # dtypes of the factors of a matrix product of PyTorch
    stream: int = 0  # number of its stream; 0 is the default one
    before: Mapping[int, int] = MappingProxyType({})  # how many launches of each stream end before it begins


class Capture(NamedTuple):
    """A CUDA graph that was captured."""

    stream: int  # number of the stream on which it was captured
    pool: tuple[int, int] | None  # its memory pool
    launches: list[Launch]  # its launches
    warmed_up: bool  # whether the stream had a launch before, outside of a graph
