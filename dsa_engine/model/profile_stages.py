"""The named stages of a forward pass: ranges in PyTorch's profiler, and events for a hook of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
_UNWATCHED = nullcontext()


def stage(name: str) -> AbstractContextManager[None]:
    """Marks the work inside as ``name``, one of :data:`STAGES`; a stage inside another takes its time out of it."""
    profiled = torch.autograd.profiler._is_profiler_enabled
    return _UNWATCHED if _hook is None and not profiled else _watched(name, _hook)


def profiled_range(name: str) -> AbstractContextManager[object]:
    """A range of a profiler that is running: one costs 18 µs of host time, which bounds a decode step."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _UNWATCHED


@contextmanager
def _watched(name: str, hook: StageHook | None) -> Iterator[None]:
    if hook is not None:
        hook.enter(name)
    try:
        with profiled_range(name):
            yield
    finally:
        if hook is not None:
            hook.leave()


def set_hook(hook: StageHook | None) -> None:
    """Makes ``hook`` the hook of all stages; None removes it. ``RuntimeError`` if there is another one."""
    global _hook
    if hook is not None and _hook is not None:
        raise RuntimeError("a StageTimer is already running; leave it first")
    _hook = hook


def has_hook() -> bool:
    """Whether the stages have a hook: a step is then run kernel by kernel, and read at once."""
    return _hook is not None
