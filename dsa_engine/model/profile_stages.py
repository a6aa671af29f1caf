"""The named stages of a forward pass: ranges in PyTorch's profiler, and events for whoever observes the pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

# The rows of every breakdown, in the order in which the data meets them.
STAGES = (
    "embedding",
    "MLA prolog",
    "indexer prolog",
    "lightning indexer",
    "sparse flash attention",
    "MLA epilog",
    "dense MLP",
    "MoE gate",
    "MoE dispatch",
    "MoE experts",
    "MoE shared",
    "MoE combine",
    "communication",
    "LM head",
)


class StageObserver(Protocol):
    """Is told where stages begin and end, such as :class:`dsa_engine.measure.stage_timer.StageTimer`."""

    def enter(self, name: str) -> None: ...

    def leave(self) -> None: ...


_observer: StageObserver | None = None


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Marks what runs inside as ``name``, one of :data:`STAGES`; a stage inside another takes its time out of it."""
    observer = _observer
    if observer is not None:
        observer.enter(name)
    # A range costs 18 µs of the host, in a step that is bound by it: only for a profiler that is running.
    profiled = torch.autograd.profiler._is_profiler_enabled
    try:
        with torch.profiler.record_function(name) if profiled else nullcontext():
            yield
    finally:
        if observer is not None:
            observer.leave()


def set_observer(observer: StageObserver | None) -> None:
    """Makes ``observer`` the one that is told; None: nobody.

    Raises:
        RuntimeError: somebody else observes already.
    """
    global _observer
    if observer is not None and _observer is not None:
        raise RuntimeError("a StageTimer is already running; leave it first")
    _observer = observer


def observed() -> bool:
    """Whether somebody observes the stages: a step is then run kernel by kernel, and read at once."""
    return _observer is not None
