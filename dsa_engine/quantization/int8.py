"""INT8 W8A8: weights int8 with a float32 scale for each output channel, inputs quantised to INT8 by the row when they
come. In a checkpoint: ``compressed-tensors``, ``NAME.weight`` int8 and ``NAME.weight_scale [out, 1]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.checkpoint import Source
from dsa_engine.config.quantization import WeightScheme
from dsa_engine.kernels.linear.linear_int8 import linear_int8
from dsa_engine.kernels.moe.expert_mlp_int8 import expert_mlp_int8
from dsa_engine.quantization.base import GroupedExperts, Linear, Matrix, StoredFormat


def _sources(part: Matrix, weight: torch.Tensor, scale: torch.Tensor) -> list[Source]:
    """What fills the codes and scales of a matrix; scales are those of its kept rows."""
    first_row, _ = part.start
    stored = Source(f"{part.name}_scale", scale[:, None], (part.rows, 1), (first_row, 0), scale_of=torch.int8)
    return [part.source(weight), stored]


class Int8Linear(Linear):
    """``weight [out, in]`` int8 and ``scale [out]`` float32."""

    scales_whole_rows = True

    def __init__(self, parts: Sequence[Matrix], dtype: torch.dtype, device: torch.device):
        rows = [part.shape[0] for part in parts]
        self.dtype = dtype
        self.weight = torch.empty(sum(rows), parts[0].shape[1], dtype=torch.int8, device=device)
        self.scale = torch.empty(sum(rows), dtype=torch.float32, device=device)
        self.tensors = (self.weight, self.scale)
        self.sources = []
        for part, weight, scale in zip(parts, self.weight.split(rows), self.scale.split(rows), strict=True):
            self.sources += _sources(part, weight, scale)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_int8(x, self.weight, self.scale)

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
        return linear_int8(x, self.weight, self.scale, row_absmax)

    def dequantized(self) -> torch.Tensor:
        return (self.weight * self.scale[:, None]).to(self.dtype)


class Int8Experts(GroupedExperts):
    """``gate_up [count, 2 · intermediate, hidden]`` and ``down [count, hidden, intermediate]``, int8, with a float32
    scale for each row."""

    def __init__(self, prefixes: Sequence[str], hidden: int, intermediate: int, device: torch.device):
        self.count = count = len(prefixes)
        self.gate_up = torch.empty(count, 2 * intermediate, hidden, dtype=torch.int8, device=device)
        self.gate_up_scale = torch.empty(count, 2 * intermediate, dtype=torch.float32, device=device)
        self.down = torch.empty(count, hidden, intermediate, dtype=torch.int8, device=device)
        self.down_scale = torch.empty(count, hidden, dtype=torch.float32, device=device)
        self.tensors = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        self.sources = []
        for prefix, *stored in zip(prefixes, *self.tensors, strict=True):
            (gate, up), (gate_scale, up_scale) = (tensor.split(intermediate) for tensor in stored[:2])
            self.sources += _sources(Matrix(f"{prefix}.gate_proj.weight", intermediate, hidden), gate, gate_scale)
            self.sources += _sources(Matrix(f"{prefix}.up_proj.weight", intermediate, hidden), up, up_scale)
            self.sources += _sources(Matrix(f"{prefix}.down_proj.weight", hidden, intermediate), *stored[2:])

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
        return expert_mlp_int8(
            tokens,
            experts,
            weights,
            (self.gate_up, self.gate_up_scale),
            (self.down, self.down_scale),
            served_fraction=served_fraction,
            served=served,
            uncounted_bytes=uncounted_bytes,
        )


class Int8(StoredFormat):
    """Linear layers and experts in INT8, on any device."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        if (scheme.strategy, scheme.symmetric, scheme.activation_bits) != ("channel", True, 8) or (
            scheme.layout != "int-quantized"
        ):
            raise ValueError(
                f"weights in {scheme.name} are not supported; of int8 supported are symmetric weights by channel with "
                "8-bit activations, int-quantized (W8A8)"
            )
        self.dtype, self.device = dtype, device

    def linear(self, *parts: Matrix) -> Int8Linear:
        return Int8Linear(parts, self.dtype, self.device)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> Int8Experts:
        return Int8Experts(prefixes, hidden, intermediate, self.device)

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        return True
