"""Weights as plain numbers in the run's dtype. The reader expands what a checkpoint holds in FP8."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.quantization.base import GroupedExperts, Linear, Matrix, WeightFormat


class UnquantizedLinear(Linear):
    """``weight [out, in]``."""

    def __init__(self, parts: Sequence[Matrix], dtype: torch.dtype, device: torch.device):
        rows = [part.shape[0] for part in parts]
        self.weight = torch.empty(sum(rows), parts[0].shape[1], dtype=dtype, device=device)
        self.tensors = (self.weight,)
        self.sources = [part.source(piece) for part, piece in zip(parts, self.weight.split(rows), strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)

    def dequantized(self) -> torch.Tensor:
        return self.weight


class UnquantizedExperts(GroupedExperts):
    """``gate_up [count, 2 · intermediate, hidden]`` and ``down [count, hidden, intermediate]``."""

    def __init__(
        self, prefixes: Sequence[str], hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ):
        self.count = len(prefixes)
        self.gate_up = torch.empty(self.count, 2 * intermediate, hidden, dtype=dtype, device=device)
        self.down = torch.empty(self.count, hidden, intermediate, dtype=dtype, device=device)
        self.tensors = (self.gate_up, self.down)
        self.sources = []
        for prefix, gate_up, down in zip(prefixes, self.gate_up, self.down, strict=True):
            gate, up = gate_up.split(intermediate)
            self.sources += [
                Matrix(f"{prefix}.gate_proj.weight", intermediate, hidden).source(gate),
                Matrix(f"{prefix}.up_proj.weight", intermediate, hidden).source(up),
                Matrix(f"{prefix}.down_proj.weight", hidden, intermediate).source(down),
            ]

    def __call__(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *,
        served_fraction: float,
        served: int | None,
        uncounted_bytes: int,
    ) -> torch.Tensor:
        return expert_mlp(
            tokens,
            experts,
            weights,
            self.gate_up,
            self.down,
            served_fraction=served_fraction,
            served=served,
            uncounted_bytes=uncounted_bytes,
        )


class Unquantized(WeightFormat):
    """All weights in one floating dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device

    def linear(self, *parts: Matrix) -> UnquantizedLinear:
        return UnquantizedLinear(parts, self.dtype, self.device)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> UnquantizedExperts:
        return UnquantizedExperts(prefixes, hidden, intermediate, self.dtype, self.device)
