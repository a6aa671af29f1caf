"""Weights as the released FP8 checkpoints hold them: e4m3 in blocks of 128 × 128, each with a float32 scale.

They keep this format in memory and in the products; activations are quantised 1 × 128 before each product. A rank that
keeps a part of a weight must cut between blocks: then activations have the same blocks, and scales, on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.config.quantization import WeightScheme
from dsa_engine.kernels.formats.fp8 import dequantize_blocks
from dsa_engine.kernels.formats.quantize import FP8, codes_and_scales
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8
from dsa_engine.kernels.linear.block_scaled_matmul import (
    BLOCK,
    FEW_ROWS,
    are_powers_of_two,
    block_scaled_linear,
    multiplies_fp8,
    no_program_finished,
    packs_scales,
    words_for,
)
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.weights import Source
from dsa_engine.weights.formats.base import GroupedExperts, Linear, Matrix, Quantized, SideBySide, StoredFormat


def blocks_of(size: int) -> int:
    """Number of blocks of ``size`` rows or columns; the last may be partial."""
    return cdiv(size, BLOCK)


def _sources(part: Matrix, codes: torch.Tensor, scales: torch.Tensor) -> list[Source]:
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
    """Raises ``ValueError`` if the kept part begins or ends inside a block."""
    for what, start, length, size in zip(
        ("row", "column"), part.start, part.shape, (part.rows, part.columns), strict=True
    ):
        for cut in (start, start + length):
            if cut % BLOCK and cut != size:
                raise ValueError(
                    f"{part.name!r} {[part.rows, part.columns]} would be cut at {what} {cut}, inside a block of "
                    f"{BLOCK}; choose a tp_size that cuts between blocks, or quantization='dequantize'"
                )


class BlockFP8Linear(Linear):
    """``weight [out, in]`` in codes, ``scale [ceil(out / 128), ceil(in / 128)]``."""

    def __init__(self, parts: Sequence[Matrix], power_of_two: bool, dtype: torch.dtype, device: torch.device):
        self._power_of_two, self._dtype = power_of_two, dtype
        self._weight_power_of_two = False  # as far as is known before loading
        self.rows, columns = [part.shape[0] for part in parts], parts[0].shape[1]
        blocks = [blocks_of(rows) for rows in self.rows]
        # Stacked matrices end with a whole block, as libraries want; of memory in steps of 2 MiB that takes none more.
        padded = sum(self.rows) if len(parts) == 1 else sum(blocks) * BLOCK
        self._padded = torch.empty(padded, columns, dtype=FP8, device=device)
        self.weight, nothing = self._padded.tensor_split([sum(self.rows)])
        nothing.zero_()
        self.scale = torch.empty(sum(blocks), blocks_of(columns), device=device)
        self.tensors = (self.weight, self.scale)
        self._finished = no_program_finished(self.weight)
        self.sources = []
        pieces = self.weight.split(self.rows), self.scale.split(blocks)
        for part, codes, scales in zip(parts, *pieces, strict=True):
            _check_cut(part)
            self.sources += _sources(part, codes, scales)

    def loaded(self) -> None:
        if self._power_of_two and packs_scales(self.scale):
            self._weight_power_of_two = are_powers_of_two(self.scale)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_quantized(x, None)

    def memory_for(self, rows: torch.Tensor) -> Quantized | None:
        words = words_for(rows, self.weight.shape[1])
        return None if words is None else Quantized(words, self._power_of_two)

    def of_quantized(self, x: torch.Tensor, quantized: Quantized | None) -> torch.Tensor:
        how = {"power_of_two": self._power_of_two, "weight_power_of_two": self._weight_power_of_two}
        given = None
        if quantized is not None and quantized.power_of_two == self._power_of_two:
            given = codes_and_scales(quantized.words, x.shape[-1])
        weight = self.weight if x.shape[0] <= FEW_ROWS else self._padded
        out = block_scaled_linear(x, weight, self.scale, finished=self._finished, quantized=given, **how)
        return out if weight is self.weight else out[..., : len(self.weight)]

    def dequantized(self) -> torch.Tensor:
        return dequantize_blocks(self.weight, self.scale, (BLOCK, BLOCK), dtype=self._dtype)


class BlockFP8Experts(GroupedExperts):
    """``gate_up [count, 2, intermediate, hidden]`` and ``down [count, hidden, intermediate]`` in codes, and the scales
    of both, with one element for each block of 128 rows or columns."""

    def __init__(
        self,
        prefixes: Sequence[str],
        hidden: int,
        intermediate: int,
        power_of_two: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        count, blocks = len(prefixes), (blocks_of(intermediate), blocks_of(hidden))
        gate_up = torch.empty(count, 2, intermediate, hidden, dtype=FP8, device=device)
        gate_up_scale = torch.empty(count, 2, *blocks, device=device)
        down = torch.empty(count, hidden, intermediate, dtype=FP8, device=device)
        down_scale = torch.empty(count, *blocks[::-1], device=device)
        stacked = gate_up.flatten(1, 2), gate_up_scale.flatten(1, 2)
        product = block_fp8(power_of_two, hidden)
        super().__init__(prefixes, hidden, intermediate, stacked, (down, down_scale), _sources, product, dtype)
        self.gate_up = (gate_up, gate_up_scale)
        self.tensors = (*self.gate_up, *self.down)


class BlockFP8(StoredFormat):
    """All weights in FP8 blocks of 128 × 128; activations by the scheme."""

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device):
        if scheme.block != (BLOCK, BLOCK) or scheme.activation_bits != 8 or scheme.layout:
            expands = scheme.block is not None and not scheme.layout
            other = "quantization='dequantize'" if expands else "the model's checkpoint in that layout, or in bfloat16"
            raise ValueError(
                f"weights in {scheme.name} cannot be multiplied in FP8: blocks must be {BLOCK} x {BLOCK}, in the "
                f"released layout; use {other}"
            )
        if device.type not in ("cpu", "meta") and not multiplies_fp8(device):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
            raise ValueError(
                f"{name} does not multiply FP8 (compute capability 8.9 and later do); use quantization='dequantize', "
                "or leave the option out"
            )
        self._scheme, self._dtype, self._device = scheme, dtype, device

    def linear(self, *parts: Matrix) -> Linear:
        if all(part.shape[0] % BLOCK == 0 for part in parts[:-1]):
            return BlockFP8Linear(parts, self._scheme.power_of_two, self._dtype, self._device)
        return SideBySide([self.linear(part) for part in parts])

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> BlockFP8Experts:
        return BlockFP8Experts(prefixes, hidden, intermediate, self._scheme.power_of_two, self._dtype, self._device)

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        return multiplies_fp8(device)
