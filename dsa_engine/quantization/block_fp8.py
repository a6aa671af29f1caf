"""Weights as the released FP8 checkpoints hold them: e4m3 in blocks of 128 × 128, each with a float32 scale.

They stay so in memory and are multiplied so; activations are quantised 1 × 128 on their way in. A rank that keeps a
part of a weight must cut between blocks: activations then have the same blocks, and scales, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.checkpoint import Source
from dsa_engine.config.quantization import WeightScheme
from dsa_engine.kernels.formats.fp8 import dequantize_blocks
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.kernels.linear.block_scaled_libraries import library_product
from dsa_engine.kernels.linear.block_scaled_matmul import BLOCK, block_scaled_linear, multiplies_fp8
from dsa_engine.kernels.moe.block_scaled_experts import block_scaled_experts
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.quantization.base import GroupedExperts, Linear, Matrix, StoredFormat


def blocks_of(size: int) -> int:
    """How many blocks ``size`` rows or columns take; the last may be partial."""
    return cdiv(size, BLOCK)


def _sources(part: Matrix, codes: torch.Tensor, scales: torch.Tensor) -> list[Source]:
    """What fills the codes and scales of the kept part of a matrix."""
    return [
        part.source(codes),
        Source(
            f"{part.name}_scale_inv",
            scales,
            (blocks_of(part.rows), blocks_of(part.columns)),
            (part.start[0] // BLOCK, part.start[1] // BLOCK),
            scale_of=FP8,
        ),
    ]


def _check_cut(part: Matrix) -> None:
    """``ValueError`` where a kept part begins or ends inside a block."""
    for what, start, kept, size in zip(
        ("row", "column"), part.start, part.shape, (part.rows, part.columns), strict=True
    ):
        for place in (start, start + kept):
            if place % BLOCK and place != size:
                raise ValueError(
                    f"{part.name!r} {[part.rows, part.columns]} would be cut at {what} {place}, inside a block of "
                    f"{BLOCK}; choose a tp_size that cuts between blocks, or quantization='dequantize'"
                )


class BlockFP8Linear(Linear):
    """``weight [out, in]`` in codes, ``scale [ceil(out / 128), ceil(in / 128)]``."""

    def __init__(self, parts: Sequence[Matrix], power_of_two: bool, dtype: torch.dtype, device: torch.device):
        self._power_of_two, self._dtype = power_of_two, dtype
        rows, columns = [part.shape[0] for part in parts], parts[0].shape[1]
        self.weight = torch.empty(sum(rows), columns, dtype=FP8, device=device)
        self.scale = torch.empty(blocks_of(sum(rows)), blocks_of(columns), device=device)
        self.tensors = (self.weight, self.scale)
        self.sources = []
        pieces = self.weight.split(rows), self.scale.split([blocks_of(n) for n in rows])
        for part, codes, scales in zip(parts, *pieces, strict=True):
            _check_cut(part)
            self.sources += _sources(part, codes, scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return block_scaled_linear(x, self.weight, self.scale, power_of_two=self._power_of_two)

    def dequantized(self) -> torch.Tensor:
        return dequantize_blocks(self.weight, self.scale, (BLOCK, BLOCK), dtype=self._dtype)


class SideBySide(Linear):
    """Linear layers over the same input whose outputs stand side by side, for matrices that share a block where they
    would be stacked."""

    def __init__(self, layers: Sequence[Linear]):
        self._layers = layers
        self.tensors = tuple(tensor for layer in layers for tensor in layer.tensors)
        self.sources = [source for layer in layers for source in layer.sources]

    def loaded(self) -> None:
        for layer in self._layers:
            layer.loaded()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self._layers], dim=-1)

    def dequantized(self) -> torch.Tensor:
        return torch.cat([layer.dequantized() for layer in self._layers])


class BlockFP8Experts(GroupedExperts):
    """``gate_up [count, 2, intermediate, hidden]`` and ``down [count, hidden, intermediate]`` in codes, and the scales
    of both, shaped alike with a block in place of 128 rows or columns."""

    def __init__(
        self, prefixes: Sequence[str], hidden: int, intermediate: int, power_of_two: bool, device: torch.device
    ):
        self._power_of_two = power_of_two
        self.count = len(prefixes)
        self.gate_up = torch.empty(self.count, 2, intermediate, hidden, dtype=FP8, device=device)
        self.gate_up_scale = torch.empty(self.count, 2, blocks_of(intermediate), blocks_of(hidden), device=device)
        self.down = torch.empty(self.count, hidden, intermediate, dtype=FP8, device=device)
        self.down_scale = torch.empty(self.count, blocks_of(hidden), blocks_of(intermediate), device=device)
        self.tensors = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        self.sources = []
        for prefix, gate_up, gate_up_scale, down, down_scale in zip(prefixes, *self.tensors, strict=True):
            for name, codes, scales in zip(("gate", "up"), gate_up, gate_up_scale, strict=True):
                self.sources += _sources(Matrix(f"{prefix}.{name}_proj.weight", intermediate, hidden), codes, scales)
            self.sources += _sources(Matrix(f"{prefix}.down_proj.weight", hidden, intermediate), down, down_scale)

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
        return block_scaled_experts(
            tokens,
            experts,
            weights,
            *self.tensors,
            power_of_two=self._power_of_two,
            served_fraction=served_fraction,
            served=served,
            uncounted_bytes=uncounted_bytes,
        )


class BlockFP8(StoredFormat):
    """All weights in FP8 blocks of 128 × 128; activations by the scheme."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        if scheme.block != (BLOCK, BLOCK) or scheme.activation_bits != 8 or scheme.layout:
            raise ValueError(
                f"weights in {scheme.name} cannot be multiplied in FP8: blocks must be {BLOCK} x {BLOCK}, in the "
                "released layout; use quantization='dequantize'"
            )
        if device.type not in ("cpu", "meta") and not multiplies_fp8(device):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
            raise ValueError(
                f"{name} does not multiply FP8 (compute capability 8.9 and later do); use quantization='dequantize', "
                "or leave the option out"
            )
        self._scheme, self._dtype, self._device = scheme, dtype, device
        if device.type == "cuda":
            library_product(torch.empty(0, device=device).device)  # tried out now, not in the middle of a step

    def linear(self, *parts: Matrix) -> Linear:
        whole_blocks = all(part.shape[0] % BLOCK == 0 for part in parts[:-1])
        if whole_blocks:
            return BlockFP8Linear(parts, self._scheme.power_of_two, self._dtype, self._device)
        return SideBySide([self.linear(part) for part in parts])

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> BlockFP8Experts:
        return BlockFP8Experts(prefixes, hidden, intermediate, self._scheme.power_of_two, self._device)

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        return multiplies_fp8(device)
