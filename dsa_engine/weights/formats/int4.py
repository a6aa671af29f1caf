"""INT4: weights packed eight to an int32, with a scale for each group of a row.

Inputs stay as they are (W4A16) or are quantised to INT8 by the row (W4A8). In a checkpoint (``compressed-tensors``):
``NAME.weight_packed``, ``NAME.weight_scale`` and ``NAME.weight_shape``, which only repeats the configuration. In memory
the words' columns are arranged for the products (:mod:`~dsa_engine.kernels.formats.int4`).

With ``actorder: "group"`` there is also ``NAME.weight_g_idx``, the group of each column. Columns are sorted by group
when they are loaded, and x is read in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.config.quantization import WeightScheme
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.int4 import (
    GROUP_SIZES,
    arrange_int4_,
    check_groups,
    columns_by_group,
    dequantize_int4,
    planes_for,
)
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8, W4A16
from dsa_engine.kernels.grouped.products import Weight
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.weights import Source
from dsa_engine.weights.formats.base import GroupedExperts, Linear, Matrix, SideBySide, StoredFormat


class _Packing:
    """Makes tensors for packed matrices and their scales, which have the dtype of activations."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        assert scheme.group_size is not None
        self.group = scheme.group_size
        self.int8_activations = scheme.activation_bits == 8
        self.product = W4A8 if self.int8_activations else W4A16
        self.planes = planes_for(self.int8_activations)
        self.ordered = scheme.actorder == "group"
        self.dtype, self.device = dtype, device

    def empty(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        *rows, columns = shape
        packed = torch.empty(*rows, columns // 8, dtype=torch.int32, device=self.device)
        return packed, torch.empty(*rows, columns // self.group, dtype=self.dtype, device=self.device)

    def empty_orders(self, *shape: int) -> torch.Tensor | None:
        """Room for the groups of columns, later for their order; None where a group's columns follow one another."""
        return torch.empty(shape, dtype=torch.int32, device=self.device) if self.ordered else None

    def arrange(self, name: str, packed: torch.Tensor, order: torch.Tensor | None = None) -> None:
        """Arranges the columns of a matrix, or of several, and replaces the groups in ``order [in]`` by their order."""
        if order is not None:
            try:
                order.copy_(columns_by_group(order, self.group))
            except ValueError as error:
                raise CheckpointError(f"{name}_g_idx: {error}") from error
        arrange_int4_(packed, self.planes, order)

    def sources(
        self, part: Matrix, packed: torch.Tensor, scale: torch.Tensor, order: torch.Tensor | None = None
    ) -> list[Source]:
        """The sources of a matrix."""
        if order is not None and part.kept_columns not in (None, (0, part.columns)):
            raise ValueError(
                f"{part.name!r} has actorder 'group': the columns of a group lie anywhere in its rows, so no rank can "
                f"keep columns {list(part.kept_columns)} alone; use tp_size=1"
            )
        row, column = part.start
        try:
            for columns in (part.columns, column, part.shape[1]):
                check_groups(columns, self.group)
        except ValueError as error:
            columns_here = "" if part.kept_columns is None else f", of which this rank keeps {list(part.kept_columns)}"
            raise ValueError(f"{part.name!r}{columns_here}: {error}") from error
        name, (rows, columns) = part.name, (part.rows, part.columns)
        groups = (rows, columns // self.group)
        without = f"{name}_g_idx" if order is None else ""
        sources = [
            Source(f"{name}_packed", packed, (rows, columns // 8), (row, column // 8), without=without),
            Source(f"{name}_scale", scale, groups, (row, column // self.group), scale_of=torch.int32),
        ]
        return sources if order is None else [*sources, Source(f"{name}_g_idx", order, (columns,))]


class Int4Linear(Linear):
    """``packed [out, in / 8]`` int32 and ``scale [out, in / group]``; the order of columns ``[in]``, if they have one.

    With an order it holds one matrix: others have their own.
    """

    def __init__(self, parts: Sequence[Matrix], packing: _Packing):
        self._packing = packing
        self.packed, self.scale = packing.empty(sum(part.shape[0] for part in parts), parts[0].shape[1])
        self._order = packing.empty_orders(parts[0].shape[1])
        if self._order is None:
            self._stack(parts, (self.packed, self.scale), packing.sources)
        else:
            (part,) = parts
            self.rows = [part.shape[0]]
            self.tensors = (self.packed, self.scale, self._order)
            self.sources = packing.sources(part, *self.tensors)
        self.scales_whole_rows = packing.int8_activations

    def loaded(self) -> None:
        self._packing.arrange(self.sources[0].name.removesuffix("_packed"), self.packed, self._order)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, (self.packed, self.scale, self._order), self._packing.product)

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, (self.packed, self.scale, None), W4A8, row_absmax)

    def dequantized(self) -> torch.Tensor:
        weight = dequantize_int4(self.packed, self.scale, self._packing.dtype, self._packing.planes)
        return weight if self._order is None else torch.empty_like(weight).index_copy_(1, self._order.long(), weight)


class Int4Experts(GroupedExperts):
    """``gate_up [count, 2 · intermediate, hidden]`` and ``down [count, hidden, intermediate]``, packed, and scales; the
    orders of their columns, ``[count, 2, hidden]`` and ``[count, intermediate]``, if they have any."""

    def __init__(self, prefixes: Sequence[str], hidden: int, intermediate: int, packing: _Packing):
        self._packing = packing
        count = len(prefixes)
        both = packing.empty(count, 2 * intermediate, hidden), packing.empty(count, hidden, intermediate)
        self._orders = packing.empty_orders(count, 2, hidden), packing.empty_orders(count, intermediate)
        gate_up, down = (
            pair if order is None else (*pair, order) for pair, order in zip(both, self._orders, strict=True)
        )
        sources, product, dtype = self._matrix_sources, packing.product, packing.dtype
        super().__init__(prefixes, hidden, intermediate, gate_up, down, sources, product, dtype)
        self.gate_up, self.down = both

    def _matrix_sources(self, part: Matrix, *pieces: torch.Tensor) -> list[Source]:
        packed, scale, *order = pieces
        return self._packing.sources(part, packed, scale, *(one.view(-1) for one in order))

    def loaded(self) -> None:
        gate_up, down = self._orders
        if gate_up is None or down is None:
            for packed, _ in (self.gate_up, self.down):
                self._packing.arrange("", packed)
            return
        names = iter([source.name.removesuffix("_packed") for source in self.sources[::3]])
        for number in range(self.count):
            halves = self.gate_up[0][number].chunk(2)
            for packed, order in zip((*halves, self.down[0][number]), (*gate_up[number], down[number]), strict=True):
                self._packing.arrange(next(names), packed, order)
        if not gate_up.is_meta and torch.equal(gate_up[:, 0], gate_up[:, 1]):
            self._orders = gate_up[:, 0].contiguous(), down  # half the products

    @property
    def moved(self) -> tuple[torch.Tensor, ...]:
        return (*self.gate_up, *self.down, *(order for order in self._orders if order is not None))

    def separate(self) -> None:
        if self._packing.ordered:
            self._orders = self.tensors[2], self.tensors[5]

    @property
    def operands(self) -> tuple[Weight, Weight]:
        of_gate_up, of_down = self._orders
        return (*self.gate_up, of_gate_up), (*self.down, of_down)


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

    def linear(self, *parts: Matrix) -> Linear:
        if self._packing.ordered and len(parts) > 1:
            return SideBySide([self.linear(part) for part in parts])
        return Int4Linear(parts, self._packing)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> Int4Experts:
        return Int4Experts(prefixes, hidden, intermediate, self._packing)
