"""The host's side of grouped products: what a weight format is to them, groups, the tiles of a program, the launch.

A format takes a weight as its parts: one tensor, or codes and scales, and in INT4 the order of columns or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import chip_of, is_batch_invariant

Weight = tuple[torch.Tensor | None, ...]


def codes_of(weight: Weight) -> torch.Tensor:
    """The first part of a weight: its codes, or its numbers."""
    codes = weight[0]
    assert codes is not None
    return codes


class Tiles(NamedTuple):
    """The shape of a program's work, and how many programs a multiprocessor runs at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    resident: int
    swapped: bool = False


def fitting(choices: Sequence[Tiles], rows: float) -> Tiles:
    """The first of ``choices``, smallest first, with room for these rows in a tile; else the last. Under
    :func:`.launch.batch_invariance` always the second: tiles of another depth add in another order."""
    if is_batch_invariant():
        return choices[1]
    for tiles in choices:
        if rows <= tiles.rows:
            return tiles
    return choices[-1]


class Groups(NamedTuple):
    """Consecutive groups of rows, each of which is multiplied by its own matrix.

    Attributes:
        row_ends: int32 ``[groups]`` on the device: the index after the last row of each group, at most R.
        source: int32 ``[R]``, the row of x ``[S, in]`` that each row is made from; None: x holds the rows, ``[R, in]``.
        gated: the halves of a matrix, ``[groups, 2 · out, …]``, are gate and up of a SwiGLU layer, and the sums go
            through it before they are rounded.
        expected: number of local rows, if the host knows it; None: R. Chooses tiles only.
    """

    row_ends: torch.Tensor
    source: torch.Tensor | None = None
    gated: bool = False
    expected: float | None = None


@dataclass(frozen=True)
class ProductFormat:
    """A weight format, as :func:`.expert_mlp.expert_mlp` and :func:`.quantized_linear.quantized_linear` take it.

    Attributes:
        quantize: ``(rows, …)`` -> the parts of x that products take, of rows, words, or what a gated product has given.
        check: ``(*parts of x, *weight)``; raises ``TypeError`` or ``ValueError`` where they do not fit.
        product: ``(*parts of x, *weight, groups, dtype)`` -> ``[R, out]``, by kernels.
        reference: ``(*parts of x, *one matrix, dtype)`` -> ``[R, out]``; of gate and up side by side.
        packed: numbers in an element of a weight.
        gate_dtype: dtype in which the reference gates; None: the result's.
        copies: rows that are held between two products, in numbers of input and output of one.
        native: the kind of a weight for the CPU's kernels (``cpu/products.h``), which read ``codes`` of this dtype;
            None: of x's.
        fits: whether scales of a shape belong to codes of a shape, where the callers do not check.
        power_of_two: whether FP8 scales of activations are rounded up.
        to_words: tokens ``[T, hidden]`` as they travel to experts, in words with codes and scales that ``quantize``
            takes: half the bytes, and the same bits; None: as they are.
        blockwise: words have a scale for each 128 codes.
    """

    quantize: Callable[..., tuple[torch.Tensor | None, ...]]
    check: Callable[..., None]
    product: Callable[..., Any]
    reference: Callable[..., torch.Tensor]
    packed: int = 1
    gate_dtype: torch.dtype | None = None
    copies: int = 1
    native: int = 0
    codes: torch.dtype | None = None
    fits: Callable[[torch.Size, torch.Size], bool] | None = None
    power_of_two: bool = False
    to_words: Callable[[torch.Tensor], torch.Tensor] | None = None
    blockwise: bool = False

    def on_a_cpu(self, dtype: torch.dtype, *weights: Weight) -> bool:
        """Whether the CPU's kernels multiply rows of a dtype of ``cpu.TYPES`` with such weights: contiguous parts that
        fit, columns in order. What they do not take, the reference takes, or refuses with an error."""
        for codes, *scales in weights:
            if codes is None or not codes.is_contiguous() or not cpu.serves(codes, dtype=self.codes or dtype):
                return False
            if not scales:
                continue
            scale, *order = scales
            scale_dtype = None if self.packed == 8 else torch.float32  # None: any that kernels read
            if scale is None or not scale.is_contiguous() or not cpu.serves(scale, dtype=scale_dtype):
                return False
            if order not in ([], [None]):
                return False
            if self.fits is not None and not self.fits(codes.shape, scale.shape):
                return False
        return True

    def multiply(self, x: Any, weight: Weight, groups: Groups, dtype: torch.dtype) -> Any:
        """Products by kernels of rows, of quantised rows, or of what a gated product has given."""
        parts = self.quantize(x)
        self.check(*parts, *weight)
        return self.product(*parts, *weight, groups, dtype)

    def multiply_reference(
        self, x: torch.Tensor, weight: Weight, counts: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """``[R, out]``; the rows of each group, ``counts`` of them, lie one after the other."""
        parts = self.quantize(x)
        self.check(*parts, *weight)
        out = torch.empty(len(x), codes_of(weight).shape[1:-1].numel(), dtype=dtype, device=x.device)
        for group, (first, last) in enumerate(pairwise(accumulate(counts, initial=0))):
            if first < last:
                rows = [None if part is None else part[first:last] for part in parts]
                matrix = [None if part is None else part[group] for part in weight]
                out[first:last] = self.reference(*rows, *matrix, dtype)
        return out


def max_tiles(rows: int, groups: int, size: int) -> int:
    """The largest number of tiles of ``size`` rows that ``rows`` rows take, however ``groups`` groups divide them."""
    return (rows + min(rows, groups) * (size - 1)) // size


def empty_product(x: torch.Tensor, weight: torch.Tensor, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """An empty result ``[R, out]`` for products with ``weight [groups, rows, …]``."""
    if groups.gated and weight.shape[1] % 2:
        raise ValueError(f"gate and up must be two halves of the weight, which is {tuple(weight.shape)}")
    rows = (x if groups.source is None else groups.source).shape[0]
    return torch.empty(rows, weight.shape[1] // (1 + groups.gated), dtype=dtype, device=x.device)


def launch_grouped(
    kernel: Any, choices: Sequence[Tiles], x: torch.Tensor, operands: Sequence[Any], out: torch.Tensor, groups: Groups,
    **constants: Any,
) -> None:  # fmt: skip
    """Launches a kernel of grouped products, with a program for each tile, but no more than run at a time.

    Args:
        kernel: takes ``x, source, row_ends, *operands, out, x_stride, width, inner, groups``, and as constants GATHER,
            GATED, WHOLE, ROWS, COLUMNS, DEPTH, SWAPPED, BAND, GROUPS_PAD and ``constants``; ``width`` is that of
            ``out``.
        choices: the first with room for a group's rows is taken, else the last.
        x: elements of a row side by side.
        out: ``[R, out]``; rows beyond the last end are not written.
    """
    row_ends, source, gated, expected = groups
    if row_ends.dtype != torch.int32 or (source is not None and source.dtype != torch.int32):
        given = None if source is None else source.dtype
        raise ValueError(f"row_ends and source must be int32, not {row_ends.dtype} and {given}")
    if not out.numel():
        return
    (rows, width), count = out.shape, row_ends.shape[0]
    tiles = fitting(choices, (rows if expected is None else expected) / count)
    programs = max_tiles(rows, count, tiles.rows) * cdiv(width * (1 + gated), tiles.columns)
    kernel[(min(programs, tiles.resident * chip_of(x).multiprocessors),)](
        x, row_ends if source is None else source, row_ends.contiguous(), *operands, out, x.stride(0), width,
        x.shape[1], count, GATHER=source is not None, GATED=gated, WHOLE=x.shape[1] % tiles.depth == 0,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, SWAPPED=tiles.swapped, BAND=16,
        GROUPS_PAD=next_power_of_2(count), num_warps=tiles.warps, num_stages=tiles.stages, **constants,
    )  # fmt: skip
