"""Kernels of other libraries behind our operations.

An adapter (`kernels/libraries/`) is a function with the arguments and the result of an operation. While operations are
compared with their references (:func:`.operation.compared`), each adapter whose library is installed and which takes a
call's arguments runs too; the fastest of our kernel and the adapters with right results serves such calls from then on.
Calls of an operation are of two classes, up to ``FEW_ROWS`` rows and more; a class has one choice. Nothing is chosen
without a comparison, nothing for tensors on a CPU, and nothing under :func:`.launch.batch_invariance`, as libraries
choose tiles by the number of rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from dsa_engine.kernels.runtime import launch

Run = TypeVar("Run", bound=Callable[..., Any])

FEW_ROWS = 64
CLASSES = ("few rows", "many rows")
_RUNS = 5
_SLEEP_CYCLES = 2_000_000  # about 1 ms, in which the host launches a run of what is timed


@dataclass(frozen=True)
class Library:
    """An adapter: its name for people, the operation that it runs, the module that it needs, and the errors that its
    results may have, over those of our kernel (:mod:`.difference`)."""

    name: str
    operation: str
    module: str
    takes: Callable[..., bool]
    run: Callable[..., Any]
    allowance: float = 1.0


ADAPTERS: dict[str, Library] = {}
IN_USE: dict[str, dict[str, Library]] = {}  # operation: class of calls: the adapter


def adapter(
    operation: str, name: str, module: str, takes: Callable[..., bool], allowance: float = 1.0
) -> Callable[[Run], Run]:
    """Marks a function as an adapter; ``takes``: whether it runs a call with these arguments."""

    def mark(run: Run) -> Run:
        ADAPTERS[name] = Library(name, operation, module, takes, run, allowance)
        return run

    return mark


def chosen(operation: str, x: torch.Tensor, args: Any, kwargs: Any) -> Library | None:
    """The adapter that runs a call; ``x``: its first tensor."""
    if not _serves(x) or not launch.runs_triton(x):
        return None
    library = IN_USE[operation].get(class_of(x))
    return library if library is not None and library.takes(*args, **kwargs) else None


def candidates(operation: str, x: torch.Tensor, args: Any, kwargs: Any) -> list[Library]:
    """The adapters of installed libraries that take a call; if one is chosen for its class, only that."""
    if not _serves(x):
        return []
    one = IN_USE.get(operation, {}).get(class_of(x))
    there = [one] if one else [one for one in ADAPTERS.values() if one.operation == operation]
    return [one for one in there if is_installed(one.module) and one.takes(*args, **kwargs)]


def _serves(x: torch.Tensor) -> bool:
    return x.is_cuda and x.shape[0] > 0 and not launch.is_batch_invariant()


def class_of(x: torch.Tensor) -> str:
    """The class of calls whose first tensor is ``x``."""
    return CLASSES[x.shape[0] > FEW_ROWS]


def is_chosen(library: Library, x: torch.Tensor) -> bool:
    """Whether an adapter runs calls of the class of ``x``."""
    return IN_USE.get(library.operation, {}).get(class_of(x)) is library


def choose(library: Library | None, operation: str, x: torch.Tensor) -> None:
    """Lets an adapter, or our kernel, run an operation's calls of the class of ``x`` from now on."""
    by_class = IN_USE.setdefault(operation, {})
    by_class.pop(class_of(x), None)
    if library is not None:
        by_class[class_of(x)] = library


def shown(library: Library, x: torch.Tensor) -> str:
    return f"{library.name} ({class_of(x)})"


def choose_fastest(
    ours: Callable[..., Any], x: torch.Tensor, others: Sequence[tuple[Library, str]], timed: Callable[..., float]
) -> dict[str, str]:
    """Lets the fastest adapter with right results run calls like this one, if it is faster than our kernel; returns why
    others do not. ``others``: adapters that have run, and what is wrong with their results; ``timed``: ms of a way to
    run the call."""
    fastest, least = None, None
    rejected: dict[str, str] = {}
    for one, reason in others:
        if not reason and is_chosen(one, x):  # by another layer
            continue
        if not reason:
            least = timed(ours) if least is None else least
            took = timed(one.run)
            if took <= least:
                fastest, least = one, took
                continue
            reason = f"it takes {took:.3g} ms, another kernel {least:.3g} ms"
        rejected[shown(one, x)] = reason
        if is_chosen(one, x):
            choose(None, one.operation, x)
    if fastest is not None:
        choose(fastest, fastest.operation, x)
    return rejected


def choices() -> dict[str, str]:
    """The adapters in use by what they run, as :func:`use` takes them."""
    return {f"{name}, {calls}": one.name for name, both in IN_USE.items() for calls, one in both.items()}


def use(names: dict[str, str]) -> None:
    """Lets these adapters run, and no others; those that are not installed do not."""
    IN_USE.clear()
    for what, name in names.items():
        if name in ADAPTERS and is_installed(ADAPTERS[name].module):
            IN_USE.setdefault(ADAPTERS[name].operation, {})[what.partition(", ")[2]] = ADAPTERS[name]


@cache
def is_installed(module: str) -> bool:
    """Whether a top-level module can be imported; PyTorch's own can."""
    return find_spec(module) is not None


def installations() -> list[tuple[str, str, float]]:
    """Module, file and time of change of each installed library, which changes with its version."""
    modules = sorted({one.module for one in ADAPTERS.values() if is_installed(one.module)})
    files = [(module, str(getattr(find_spec(module), "origin", None))) for module in modules]
    return [(module, file, os.path.getmtime(file) if os.path.exists(file) else 0.0) for module, file in files]


def milliseconds(run: Callable[[], Any], runs: int = _RUNS, before: Callable[[], object] = lambda: None) -> float:
    """Mean time of ``runs`` runs on the device, without the host's, after one more and then ``before``."""
    run()
    before()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES * runs)
    begin.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / runs
