"""INT8 W8A8: int8 weights with a float32 scale for each output channel; inputs are quantised to INT8 by the row.

In a checkpoint (``compressed-tensors``): ``NAME.weight`` int8 and ``NAME.weight_scale [out, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.config.quantization import WeightScheme
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.weights import Source
from dsa_engine.weights.formats.base import GroupedExperts, Linear, Matrix, StoredFormat


def _sources(part: Matrix, weight: torch.Tensor, scale: torch.Tensor) -> list[Source]:
    first_row, _ = part.start
    scales = Source(f"{part.name}_scale", scale[:, None], (part.rows, 1), (first_row, 0), scale_of=torch.int8)
    return [part.source(weight), scales]


class Int8Linear(Linear):
    """``weight [out, in]`` int8 and ``scale [out]`` float32."""

    scales_whole_rows = True

    def __init__(self, parts: Sequence[Matrix], dtype: torch.dtype, device: torch.device):
        rows = sum(part.shape[0] for part in parts)
        self.dtype = dtype
        self.weight = torch.empty(rows, parts[0].shape[1], dtype=torch.int8, device=device)
        self.scale = torch.empty(rows, dtype=torch.float32, device=device)
        self._stack(parts, (self.weight, self.scale), _sources)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, (self.weight, self.scale), INT8)

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, (self.weight, self.scale), INT8, row_absmax)

    def dequantized(self) -> torch.Tensor:
        return (self.weight * self.scale[:, None]).to(self.dtype)


class Int8Experts(GroupedExperts):
    """``gate_up [count, 2 · intermediate, hidden]`` and ``down [count, hidden, intermediate]``, int8, with a float32
    scale for each row."""

    def __init__(
        self, prefixes: Sequence[str], hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ):

        def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = torch.empty(len(prefixes), rows, columns, dtype=torch.int8, device=device)
            return codes, torch.empty(len(prefixes), rows, device=device)

        gate_up, down = empty(2 * intermediate, hidden), empty(hidden, intermediate)
        super().__init__(prefixes, hidden, intermediate, gate_up, down, _sources, INT8, dtype)


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
        return Int8Experts(prefixes, hidden, intermediate, self.dtype, self.device)
