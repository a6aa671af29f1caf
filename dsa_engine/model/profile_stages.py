"""The named stages of a forward pass: ranges in PyTorch's profiler, and events for a hook of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

# The rows of every breakdown, in the order of computation.
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


class StageHook(Protocol):
    """Gets a call where a stage begins and ends, such as :class:`dsa_engine.measure.stage_timer.StageTimer`."""

    def enter(self, name: str) -> None: ...

    def leave(self) -> None: ...


_hook: StageHook | None = None


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Marks the work inside as ``name``, one of :data:`STAGES`; a stage inside another takes its time out of it."""
    hook = _hook
    if hook is not None:
        hook.enter(name)
    # A range costs 18 µs of host time, which bounds a decode step: only for a profiler that is running.
    profiled = torch.autograd.profiler._is_profiler_enabled
    try:
        with torch.profiler.record_function(name) if profiled else nullcontext():
            yield
    finally:
        if hook is not None:
            hook.leave()


def set_hook(hook: StageHook | None) -> None:
    """Makes ``hook`` the hook of all stages; None removes it.

    Raises:
        RuntimeError: there is another hook.
    """
    global _hook
    if hook is not None and _hook is not None:
        raise RuntimeError("a StageTimer is already running; leave it first")
    _hook = hook


def has_hook() -> bool:
    """Whether the stages have a hook: a step is then run kernel by kernel, and read at once."""
    return _hook is not None
