"""INT4: weights packed eight to an int32, with a scale for each group of a row.

Inputs stay as they are (W4A16) or are quantised to INT8 by the row (W4A8). In a checkpoint (``compressed-tensors``):
``NAME.weight_packed``, ``NAME.weight_scale`` and ``NAME.weight_shape``, which only repeats the configuration. In memory
the words' columns are arranged for the products (:mod:`~dsa_engine.kernels.formats.int4`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsa_engine.checkpoint import Source
from dsa_engine.config.quantization import WeightScheme
from dsa_engine.kernels.formats.int4 import GROUP_SIZES, arrange_int4_, check_groups, dequantize_int4, planes_for
from dsa_engine.kernels.linear.linear_int4 import linear_int4
from dsa_engine.kernels.moe.expert_mlp_int4 import expert_mlp_int4
from dsa_engine.quantization.base import GroupedExperts, Linear, Matrix, StoredFormat


class _Packing:
    """Makes tensors for packed matrices and their scales, which have the dtype of activations."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        assert scheme.group_size is not None
        self.group = scheme.group_size
        self.int8_activations = scheme.activation_bits == 8
        self.planes = planes_for(self.int8_activations)
        self.dtype, self.device = dtype, device

    def empty(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        *rows, columns = shape
        packed = torch.empty(*rows, columns // 8, dtype=torch.int32, device=self.device)
        return packed, torch.empty(*rows, columns // self.group, dtype=self.dtype, device=self.device)

    def sources(self, part: Matrix, packed: torch.Tensor, scale: torch.Tensor) -> list[Source]:
        """The sources of a matrix.

        Raises:
            ValueError: the group size does not divide its columns, or a rank's part of them.
        """
        row, column = part.start
        try:
            for columns in (part.columns, column, part.shape[1]):
                check_groups(columns, self.group)
        except ValueError as error:
            columns_here = "" if part.kept_columns is None else f", of which this rank keeps {list(part.kept_columns)}"
            raise ValueError(f"{part.name!r}{columns_here}: {error}") from error
        name, (rows, columns) = part.name, (part.rows, part.columns)
        groups = (rows, columns // self.group)
        return [
            Source(f"{name}_packed", packed, (rows, columns // 8), (row, column // 8)),
            Source(f"{name}_scale", scale, groups, (row, column // self.group), scale_of=torch.int32),
        ]


class Int4Linear(Linear):
    """``packed [out, in / 8]`` int32 and ``scale [out, in / group]``."""

    def __init__(self, parts: Sequence[Matrix], packing: _Packing):
        self._packing = packing
        self.packed, self.scale = packing.empty(sum(part.shape[0] for part in parts), parts[0].shape[1])
        self._stack(parts, (self.packed, self.scale), packing.sources)
        self.scales_whole_rows = packing.int8_activations

    def loaded(self) -> None:
        arrange_int4_(self.packed, self._packing.planes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_int4(x, self.packed, self.scale, int8_activations=self._packing.int8_activations)

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
        return linear_int4(x, self.packed, self.scale, int8_activations=True, largest=row_absmax)

    def dequantized(self) -> torch.Tensor:
        return dequantize_int4(self.packed, self.scale, self._packing.dtype, self._packing.planes)


class Int4Experts(GroupedExperts):
    """``gate_up [count, 2 · intermediate, hidden]`` and ``down [count, hidden, intermediate]``, packed, and scales."""

    def __init__(self, prefixes: Sequence[str], hidden: int, intermediate: int, packing: _Packing):
        self._packing = packing
        self.gate_up = packing.empty(len(prefixes), 2 * intermediate, hidden)
        self.down = packing.empty(len(prefixes), hidden, intermediate)
        super().__init__(prefixes, hidden, intermediate, self.gate_up, self.down, packing.sources)

    def loaded(self) -> None:
        for packed, _ in (self.gate_up, self.down):
            arrange_int4_(packed, self._packing.planes)

    def _mlp(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, **counts: Any) -> torch.Tensor:
        int8 = self._packing.int8_activations
        return expert_mlp_int4(tokens, experts, weights, self.gate_up, self.down, int8_activations=int8, **counts)


class Int4(StoredFormat):
    """Experts, and where a checkpoint has them linear layers too, in INT4, on any device."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        if (
            (scheme.strategy, scheme.symmetric, scheme.layout) != ("group", True, "pack-quantized")
            or scheme.activation_bits not in (None, 8)
            or scheme.group_size not in GROUP_SIZES
        ):
            raise ValueError(
                f"weights in {scheme.name} are not supported; of int4 supported are symmetric weights in groups of "
                f"{', '.join(map(str, GROUP_SIZES))} with plain or 8-bit activations, pack-quantized (W4A16, W4A8)"
            )
        self._packing = _Packing(scheme, dtype, device)

    def linear(self, *parts: Matrix) -> Int4Linear:
        return Int4Linear(parts, self._packing)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> Int4Experts:
        return Int4Experts(prefixes, hidden, intermediate, self._packing)

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        return True
