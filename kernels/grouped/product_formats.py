"""The weight formats of products: how rows are quantised for them, and their kernel and reference.

A format takes a weight as its parts: one tensor, or codes and scales, and in INT4 the order of columns or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from dsa_engine.kernels.formats.int4 import GROUP_SIZES
from dsa_engine.kernels.formats.int8 import codes_and_scale, int8_words, quantize_rows_int8
from dsa_engine.kernels.formats.quantize import FP8, codes_and_scales, quantize_rows, quantize_tokens, quantized_words
from dsa_engine.kernels.grouped.grouped_matmul import check, grouped_matmul, matmul_reference
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import (
    BLOCK,
    check_weight,
    grouped_matmul_fp8,
    matmul_fp8_reference,
)
from dsa_engine.kernels.grouped.grouped_matmul_int4 import check_int4, grouped_matmul_int4, matmul_int4_reference
from dsa_engine.kernels.grouped.grouped_matmul_int8 import check_int8, grouped_matmul_int8, matmul_int8_reference
from dsa_engine.kernels.grouped.tiles import Groups
from dsa_engine.kernels.runtime import cpu

Weight = tuple[torch.Tensor | None, ...]


def codes_of(weight: Weight) -> torch.Tensor:
    """The first part of a weight: its codes, or its numbers."""
    codes = weight[0]
    assert codes is not None
    return codes


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


def _as_they_are(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x,)


def _with_no_scales(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
    return x, None


def _rows_int8(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return codes_and_scale(x) if x.dtype == torch.int32 else quantize_rows_int8(x, largest)


def _check_fp8(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    check_weight(weight, weight_scale)
    if x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")


def _fits_int4(codes: torch.Size, scales: torch.Size) -> bool:
    return codes[:-1] == scales[:-1] and 8 * codes[-1] in [size * scales[-1] for size in GROUP_SIZES]


_INT4 = partial(
    ProductFormat, check=check_int4, product=grouped_matmul_int4, reference=matmul_int4_reference, packed=8,
    codes=torch.int32, fits=_fits_int4,
)  # fmt: skip

PLAIN = ProductFormat(_as_they_are, check, grouped_matmul, matmul_reference, copies=2)
INT8 = ProductFormat(
    _rows_int8, check_int8, grouped_matmul_int8, matmul_int8_reference, native=3, codes=torch.int8,
    fits=lambda codes, scales: codes[:-1] == scales, to_words=int8_words,
)  # fmt: skip
W4A16 = _INT4(_with_no_scales, native=5)
W4A8 = _INT4(_rows_int8, native=6, to_words=int8_words)


@cache
def block_fp8(power_of_two: bool, hidden: int) -> ProductFormat:
    """FP8 by blocks, for experts.

    Args:
        power_of_two: round the scales of activations up to powers of two.
        hidden: numbers of a token.
    """
    words = quantized_words(hidden)

    def quantize(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(x, tuple):  # by the gated product
            return x
        if x.dtype != torch.int32:
            return quantize_rows(x, BLOCK, power_of_two)
        if x.shape[1] != words:
            raise ValueError(f"quantised tokens of {hidden} numbers are not {tuple(x.shape)}")
        return codes_and_scales(x, hidden)

    product = partial(grouped_matmul_fp8, power_of_two=power_of_two)
    to_words = None if words is None else partial(quantize_tokens, power_of_two=power_of_two)
    return ProductFormat(
        quantize, _check_fp8, product, matmul_fp8_reference, gate_dtype=torch.float32, native=4,
        codes=FP8, power_of_two=power_of_two, to_words=to_words, blockwise=True,
    )  # fmt: skip
