"""Differences between the results of a kernel and of its reference, and the largest that are allowed.

Numbers are compared one by one, relative to the largest, and all together, by norms: rounding moves many numbers a
little, a fault moves few numbers far or all of them alike. Whole numbers must be equal.
"""

from __future__ import annotations

from typing import Literal

import torch

Kind = Literal["plain", "quantised", "near ties"]

# By dtype: the largest error of a number over the largest number, and ‖difference‖ / ‖wanted‖. Rounding differs, and
# products of long rows add in another order; the roundings of an operation alone give norms of 2e-3 in bfloat16.
_BOUNDS = {torch.float32: (2e-3, 2e-3), torch.float16: (1e-2, 2.5e-3), torch.bfloat16: (4e-2, 1e-2)}
# Numbers in e4m3, whose steps are 1/8 to 1/16 of a number: the next code, or the same number by the next scale.
_QUANTISED = (0.1, 1e-2)
_MAX_ROWS = 0.02  # fraction of rows with near ties that fall the other way; one row at least


def differences(
    ours: torch.Tensor,
    wanted: torch.Tensor,
    defined: torch.Tensor | None = None,
    kind: Kind = "plain",
    bounds: tuple[float, float] | None = None,
) -> list[tuple[float, float]]:
    """Measured errors of a result, each with the largest that is allowed.

    Args:
        defined: mask of the elements that count; default: all.
        kind: of the result's numbers: "quantised" ones differ by a step of e4m3; with "near ties", whole rows of a
            matrix differ where rounding decides.
        bounds: the errors that are allowed, of a number and of the norm; default: those of one operation in the dtype
            of ``wanted``.

    Returns:
        the largest error of a number over the largest number, and the norm of the error over that of ``wanted``; or the
        fraction of rows that differ; or the fraction of whole numbers that differ. Infinite where what is finite in one
        is not in the other.
    """
    if defined is not None:
        ours, wanted = ours[defined], wanted[defined]
    if wanted.numel() == 0:
        return [(0.0, 0.0)]
    if wanted.dtype not in _BOUNDS:
        if wanted.dtype.is_floating_point:  # FP8: by its codes
            ours, wanted = ours.view(torch.uint8), wanted.view(torch.uint8)
        return [(float((ours != wanted).float().mean()), 0.0)]
    bounds = bounds or (_QUANTISED if kind == "quantised" else _BOUNDS[wanted.dtype])
    a, b = ours.float(), wanted.float()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].isnan(), b[~finite].isnan()):
        return [(float("inf"), bounds[0])]
    if kind == "near ties":
        return [_rows_apart(a, b, bounds[0])]
    a, b = a[finite], b[finite]
    if not a.numel():
        return [(0.0, bounds[0])]
    gap = a - b
    largest = float(gap.abs().max() / b.abs().max().clamp(min=1e-30))
    return [(largest, bounds[0]), (float(_norm(gap) / _norm(b).clamp(min=1e-30)), bounds[1])]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _rows_apart(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> tuple[float, float]:
    """Fraction of the rows ``[rows, n]`` that differ, and the fraction that may. All count as different if one is more
    than another choice among near ties: it is empty, turned around, or over twice as large."""
    apart = (a - b).abs().amax(dim=1) > tolerance * b.abs().max()
    lengths = a[apart].norm(dim=1) / b[apart].norm(dim=1).clamp(min=1e-30)
    strange = (lengths < 0.5) | (lengths > 2) | ((a[apart] * b[apart]).sum(dim=1) < 0)
    if bool(strange.any()):
        return 1.0, 0.0
    return float(apart.float().mean()), max(_MAX_ROWS, 1 / len(apart))
