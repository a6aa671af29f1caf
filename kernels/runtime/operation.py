"""Operations, and whether they run their kernel on a device or, if that is wrong, their reference.

Every public function that may launch a kernel is an ``@operation``. While :func:`compared` watches, each call runs both
ways, and a kernel whose results differ, or that does not compile, is replaced: from then on its operation runs the
reference. So a forward pass that is watched checks exactly the kernels that it uses, at its shapes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.error_line import error_line

P = ParamSpec("P")
R = TypeVar("R")

# Largest relative error of a result, by its dtype: rounding differs, and products of long rows add in another order.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Largest fraction of whole numbers and codes that differ: a near tie or a rounding may fall the other way.
_MAX_DIFFERENT = 0.02


@dataclass
class Comparison:
    """The results of a watched run.

    Attributes:
        errors: the largest error of each operation that ran both ways: relative, or the fraction of whole numbers that
            differ; infinite where the kernel does not run.
        wrong: the reason for each operation whose kernel was replaced.
        before: called with an operation's name before its kernel runs for the first time.
    """

    before: Callable[[str], None] = lambda name: None
    errors: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


_replaced: dict[str, str] = {}  # operation: why its reference runs
_watching: Comparison | None = None


def operation(
    *,
    writes: tuple[str, ...] = (),
    defined: Callable[..., torch.Tensor] | None = None,
    runs: Callable[[torch.Tensor], bool] = launch.runs_triton,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a public function that runs a kernel or its reference as an operation, named as the function is.

    Args:
        writes: the arguments that it writes to.
        defined: makes a mask of the defined elements of the result from the arguments; default: all are.
        runs: whether it runs a kernel on its first tensor.
    """

    def mark(run: Callable[P, R]) -> Callable[P, R]:
        name = run.__name__

        @functools.wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _replaced and _watching is None:
                return run(*args, **kwargs)
            if name in _replaced:
                with launch.references():
                    return run(*args, **kwargs)
            if _watching is not None and runs(_first_tensor(*args, *kwargs.values())):
                return _both_ways(_watching, run, writes, defined, args, kwargs)
            return run(*args, **kwargs)

        return call

    return mark


@contextmanager
def compared(comparison: Comparison) -> Iterator[Comparison]:
    """Within, every operation that would launch a kernel runs both ways, and goes on with the reference's result."""
    global _watching
    before, _watching = _watching, comparison
    try:
        yield comparison
    finally:
        _watching = before


def replaced() -> dict[str, str]:
    """The operations of this process that run their reference, and why."""
    return dict(_replaced)


def replace(kernels: dict[str, str]) -> None:
    """Lets these operations run their reference from now on, and all others their kernel."""
    _replaced.clear()
    _replaced.update(kernels)


def difference(ours: torch.Tensor, wanted: torch.Tensor, defined: torch.Tensor | None = None) -> float:
    """Error of a result: the largest difference over the largest number, or the fraction of whole numbers and
    codes that differ. Infinite where what is finite in one is not in the other."""
    if defined is not None:
        ours, wanted = ours[defined], wanted[defined]
    if wanted.numel() == 0:
        return 0.0
    if wanted.dtype not in _TOLERANCE:
        if wanted.dtype.is_floating_point:  # FP8: by its codes
            ours, wanted = ours.view(torch.uint8), wanted.view(torch.uint8)
        return float((ours != wanted).float().mean())
    a, b = ours.float(), wanted.float()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].isnan(), b[~finite].isnan()):
        return float("inf")
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0


def _both_ways(
    comparison: Comparison,
    run: Callable[P, R],
    writes: tuple[str, ...],
    defined: Callable[..., torch.Tensor] | None,
    args: Any,
    kwargs: Any,
) -> R:
    name = run.__name__
    apart = inspect.signature(run).bind(*args, **kwargs)
    written = {key: apart.arguments[key] for key in writes if apart.arguments.get(key) is not None}
    copies = {key: _copy(x) for key, x in written.items()}
    apart.arguments.update(copies)
    if name not in comparison.errors:
        comparison.before(name)
    reason, ours = "", None
    try:
        ours = run(*apart.args, **apart.kwargs)  # operations within it are compared by themselves
    except Exception as problem:  # a compiler's own error, of whatever type
        reason = error_line(problem)
    with launch.references():
        wanted = run(*args, **kwargs)
    error = float("inf")
    if not reason:
        mask = None if defined is None else defined(*args, **kwargs)
        pairs = [*zip(_tensors(ours), _tensors(wanted), strict=True)]
        pairs += [(copies[key], x) for key, x in written.items()]
        errors = [(difference(a, b, mask), _TOLERANCE.get(b.dtype, _MAX_DIFFERENT)) for a, b in pairs]
        error = max(e for e, _ in errors)
        worst = max(errors, key=lambda pair: pair[0] / pair[1])
        if worst[0] > worst[1]:
            reason = f"its result differs from the reference by {worst[0]:.2g}; allowed is {worst[1]:.2g}"
    comparison.errors[name] = max(comparison.errors.get(name, 0.0), error)
    if reason:
        comparison.wrong[name] = _replaced[name] = reason
    return wanted


def _first_tensor(*values: object) -> torch.Tensor:
    return next(x for x in values if isinstance(x, torch.Tensor))


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which the kernel must handle."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for x in result if isinstance(x, torch.Tensor)] if isinstance(result, tuple) else []
