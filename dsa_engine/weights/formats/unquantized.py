"""Weights in plain numbers of the run's dtype. The reader expands what a checkpoint holds in FP8."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.kernels.grouped.grouped_matmul import PLAIN
from dsa_engine.kernels.linear.linear import linear
from dsa_engine.weights import Source
from dsa_engine.weights.formats.base import GroupedExperts, Linear, Matrix, WeightFormat


def _sources(part: Matrix, weight: torch.Tensor) -> list[Source]:
    return [part.source(weight)]


class UnquantizedLinear(Linear):
    """``weight [out, in]``."""

    def __init__(self, parts: Sequence[Matrix], dtype: torch.dtype, device: torch.device):
        rows = sum(part.shape[0] for part in parts)
        self.weight = torch.empty(rows, parts[0].shape[1], dtype=dtype, device=device)
        self._stack(parts, (self.weight,), _sources)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)

    def dequantized(self) -> torch.Tensor:
        return self.weight


class UnquantizedExperts(GroupedExperts):
    """``gate_up [count, 2 · intermediate, hidden]`` and ``down [count, hidden, intermediate]``."""

    def __init__(
        self, prefixes: Sequence[str], hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ):
        count = len(prefixes)
        gate_up = torch.empty(count, 2 * intermediate, hidden, dtype=dtype, device=device)
        down = torch.empty(count, hidden, intermediate, dtype=dtype, device=device)
        super().__init__(prefixes, hidden, intermediate, (gate_up,), (down,), _sources, PLAIN, dtype)


class Unquantized(WeightFormat):
    """All weights in one floating dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device

    def linear(self, *parts: Matrix) -> UnquantizedLinear:
        return UnquantizedLinear(parts, self.dtype, self.device)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> UnquantizedExperts:
        return UnquantizedExperts(prefixes, hidden, intermediate, self.dtype, self.device)
