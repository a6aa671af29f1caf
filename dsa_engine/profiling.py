"""Where the time of a forward pass goes: named stages, seen by PyTorch's profiler and summed by :class:`StageTimer`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

_active: StageTimer | None = None


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Marks what runs inside as ``name``, one of :data:`STAGES`; a stage inside another takes its time out of it."""
    timer = _active
    if timer is not None:
        timer.enter(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if timer is not None:
            timer.leave()


class StageTimer:
    """Sums the time spent in each stage while it is entered as a context; read ``seconds()`` afterwards.

    On CUDA the time is the device's, taken with events on the current stream; on a CPU it is wall time.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._stack = ["other"]
        self._marks: list[tuple[str, Any]] = []  # a stage and where it begins: a CUDA event, or seconds

    def __enter__(self) -> StageTimer:
        global _active
        if _active is not None:
            raise RuntimeError("a StageTimer is already running; leave it first")
        _active = self
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        self._stack.append("")  # what follows, up to the next entry, is nobody's
        self._mark()
        self._stack.pop()
        _active = None

    def enter(self, name: str) -> None:
        if name not in STAGES:
            raise ValueError(f"{name!r} is no stage; stages are {', '.join(STAGES)}")
        self._stack.append(name)
        self._mark()

    def leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((self._stack[-1], event))
        else:
            self._marks.append((self._stack[-1], time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds in every stage, and in "other" what lay between them."""
        if self._cuda:
            torch.cuda.synchronize()
        total = dict.fromkeys((*STAGES, "other"), 0.0)
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                total[name] += begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
        return total
