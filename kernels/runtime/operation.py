"""Operations, and whether they run their kernel on a device or, if that is wrong, their reference.

Every public function that may launch a kernel is an ``@operation``. While :func:`compared` watches, each call runs both
ways, and a kernel whose results differ, or that does not compile, is replaced: from then on its operation runs the
reference. So a forward pass that is watched checks exactly the kernels that it uses, at its shapes.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from dsa_engine.kernels.runtime import launch, libraries
from dsa_engine.kernels.runtime.difference import Kind, differences
from dsa_engine.kernels.runtime.kernel import this_thread

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Comparison:
    """The results of a watched run.

    Attributes:
        errors: the largest error of each operation that ran both ways, as :func:`.difference.differences` measures;
            infinite where the kernel does not run.
        wrong: the reason for each operation whose kernel was replaced.
        rejected: why an adapter of another library (:mod:`.libraries`) does not run calls of a class.
        before: called with the name of an operation or adapter before its kernel runs for the first time.
    """

    before: Callable[[str], None] = lambda name: None
    errors: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


_replaced: dict[str, str] = {}  # operation: why its reference runs


class _OfThread(threading.local):
    watching: Comparison | None = None


_of_thread = _OfThread()

# (arguments by name, result) -> what is compared instead of the result and of what is written; None: these are
View = Callable[[dict[str, Any], Any], list[torch.Tensor] | None]


@dataclass(frozen=True)
class Operation:
    """A marked function, see :func:`operation`; ``kind`` is of what ``view`` gives."""

    run: Callable[..., Any]
    writes: tuple[str, ...]
    defined: Callable[..., torch.Tensor] | None
    kind: Kind
    view: View | None
    waits: bool


OPERATIONS: dict[str, Operation] = {}


def operation(
    *,
    writes: tuple[str, ...] = (),
    defined: Callable[..., torch.Tensor] | None = None,
    runs: Callable[[torch.Tensor], bool] = launch.runs_triton,
    decoded: View | None = None,
    near_ties: View | None = None,
    waits: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a public function that runs a kernel or its reference as an operation, named as the function is.

    Args:
        writes: the arguments that it writes to.
        defined: makes a mask of the defined elements of the result from the arguments; default: all are.
        runs: whether it runs a kernel on its first tensor.
        decoded: the numbers that quantised results stand for. Rounding decides codes and scales: a scale may come out
            as the next one with other codes for the same numbers.
        near_ties: float results by row, where rounding decides a few rows: a near tie falls the other way.
        waits: the reference waits for the device, which a CUDA graph does not allow.
    """

    def mark(run: Callable[P, R]) -> Callable[P, R]:
        name = run.__name__
        kind: Kind = "quantised" if decoded else "near ties" if near_ties else "plain"
        marked = OPERATIONS[name] = Operation(run, writes, defined, kind, decoded or near_ties, waits)

        @functools.wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            watching = _of_thread.watching
            if not _replaced and watching is None and name not in libraries.IN_USE:
                return run(*args, **kwargs)
            # An engine with batch_invariant has found all kernels right at its start: another engine replaced this one.
            if name in _replaced and (watching is not None or not launch.is_batch_invariant()):
                with launch.references():
                    return run(*args, **kwargs)
            if watching is not None and runs(_first_tensor(*args, *kwargs.values())):
                return compare(watching, marked, args, kwargs)
            if name in libraries.IN_USE:
                library = libraries.chosen(name, _first_tensor(*args, *kwargs.values()), args, kwargs)
                return this_thread.as_one(library.run, *args, **kwargs) if library else run(*args, **kwargs)
            return run(*args, **kwargs)

        return call

    return mark


@contextmanager
def compared(comparison: Comparison) -> Iterator[Comparison]:
    """Within, every operation of this thread that would launch a kernel runs both ways, and goes on with the
    reference's result."""
    with _watched(comparison):
        yield comparison


@contextmanager
def _watched(comparison: Comparison | None) -> Iterator[None]:
    before, _of_thread.watching = _of_thread.watching, comparison
    try:
        yield
    finally:
        _of_thread.watching = before


def replaced() -> dict[str, str]:
    """The operations of this process that run their reference, and why."""
    return dict(_replaced)


def replace(kernels: dict[str, str]) -> None:
    """Lets these operations run their reference from now on, and all others their kernel; under
    :func:`.launch.batch_invariance` all run their kernel."""
    _replaced.clear()
    _replaced.update(kernels)


def waiting() -> set[str]:
    """The replaced operations whose reference waits for the device."""
    return {name for name in _replaced if name in OPERATIONS and OPERATIONS[name].waits}


def compare(comparison: Comparison, marked: Operation, args: Any, kwargs: Any) -> Any:
    """Runs an operation both ways, writes down the error, and replaces a kernel that is wrong. Where it is right, the
    adapters of other libraries are tried too.

    Returns:
        the reference's result; what is written holds the reference's too.
    """
    name, run = marked.run.__name__, marked.run
    given, before = (inspect.signature(run).bind(*args, **kwargs) for _ in range(2))
    written = [key for key in marked.writes if given.arguments.get(key) is not None]
    before.arguments.update({key: _copy(given.arguments[key]) for key in written})
    if name not in comparison.errors:
        comparison.before(name)

    def apart() -> inspect.BoundArguments:
        bound = inspect.signature(run).bind(*before.args, **before.kwargs)
        bound.arguments.update({key: _copy(before.arguments[key]) for key in written})
        return bound

    def tried(way: Callable[..., Any]) -> tuple[inspect.BoundArguments, Any, str]:
        """Arguments and result of a way to run it, and why it did not run."""
        bound = apart()
        try:
            return bound, way(*bound.args, **bound.kwargs), ""  # operations within it are compared by themselves
        except Exception as problem:  # a compiler's own error, of whatever type
            return bound, None, error_line(problem)

    def judged(bound: inspect.BoundArguments, ours: Any, reason: str, allowance: float = 1.0) -> tuple[float, str]:
        """The error of what was tried, and the reason if it is wrong."""
        if reason:
            return float("inf"), reason
        for each in (bound, given, before):
            each.apply_defaults()
        defined = None if marked.defined is None else marked.defined(*args, **kwargs)
        both = (bound.arguments, ours), (given.arguments, wanted)
        errors = _errors(marked, defined, written, *both, before.arguments)
        worst, bound_of = max(errors, key=lambda pair: pair[0] / max(pair[1], 1e-30))
        allowed = allowance * bound_of
        wrong = f"its result differs from the reference by {worst:.2g}; allowed is {allowed:.2g}"
        return max(error for error, _ in errors), wrong if worst > allowed else ""

    def timed(way: Callable[..., Any]) -> float:
        bound = apart()
        with _watched(None):
            return libraries.milliseconds(lambda: way(*bound.args, **bound.kwargs))

    ours = tried(run)
    x = _first_tensor(*args, *kwargs.values())
    others = []
    for one in libraries.candidates(name, x, args, kwargs):
        if libraries.shown(one, x) not in comparison.rejected and one.name not in _replaced:
            comparison.before(one.name)
            others.append((one, tried(one.run)))
    with launch.references():
        wanted = run(*args, **kwargs)  # last, as what it writes to may be what it reads
    error, reason = judged(*ours)
    comparison.errors[name] = max(comparison.errors.get(name, 0.0), error)
    if reason:
        comparison.wrong[name] = _replaced[name] = reason
    else:
        verdicts = [(one, judged(*each, one.allowance)[1]) for one, each in others]
        comparison.rejected.update(libraries.choose_fastest(run, x, verdicts, timed))
    return wanted


def _errors(
    marked: Operation,
    defined: torch.Tensor | None,
    written: list[str],
    ours: tuple[dict[str, Any], Any],
    wanted: tuple[dict[str, Any], Any],
    before: dict[str, Any],
) -> list[tuple[float, float]]:
    """The measured and allowed errors of a call, given by its arguments and its result both ways. Of what it writes to,
    the elements are compared that have changed since ``before``: others may hold anything."""
    kind, view = marked.kind, marked.view
    a, b = (None if view is None else view(*call) for call in (ours, wanted))
    starts: Sequence[torch.Tensor | None] | None = view(before, None) if view is not None and written else None
    if a is None or b is None:
        kind = "plain"
        a, b = ([*_tensors(result), *(given[key] for key in written)] for given, result in (ours, wanted))
        starts = [*[None] * (len(b) - len(written)), *(before[key] for key in written)]
    errors = [(0.0, 0.0)]
    for x, y, start in zip(a, b, starts or [None] * len(b), strict=True):
        errors += differences(x, y, defined if start is None else _changed(start, x, y), kind)
    return errors


def _changed(before: torch.Tensor, ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The elements that a kernel or its reference has written; NaN that was there before is none."""
    changed = torch.zeros_like(before, dtype=torch.bool)
    for x in (ours, wanted):
        changed |= (x != before) & ~((x != x) & (before != before))
    return changed


def _first_tensor(*values: object) -> torch.Tensor:
    return next(x for x in values if isinstance(x, torch.Tensor))


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which the kernel must handle."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for x in result if isinstance(x, torch.Tensor)] if isinstance(result, tuple) else []


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty without one."""
    return (str(error).splitlines() or [""])[0]


def error_line(error: BaseException, max_length: int = 200) -> str:
    """Type of an error and the first ``max_length`` characters of its first line."""
    return f"{type(error).__name__}: {first_line(error)[:max_length]}"
