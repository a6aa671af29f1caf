"""Work done in place of the other ranks of an emulated run, and its time.

This work is not the rank's own, so its time is subtracted from a measured run. It cannot be measured within that run: a
step that is replayed as a graph has no stages, and watching a step takes time. So one more run records this work, which
is then run again separately, in the same way as in the measured step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from dsa_engine.measure.stage_timer import EMULATION
from dsa_engine.model.profile_stages import stage

R = TypeVar("R")

_REPEATS = 3

_noting: StandIns | None = None


def stand_in(what: Hashable, make: Callable[[], R], collective: bool = False) -> R:
    """The result of ``make``, in place of the data of other ranks.

    Args:
        what: name of the work; the same name always means the same amount.
        make: may be called again later.
        collective: the work of a collective, which waits for nothing, so that a CUDA graph can hold it.
    """
    with stage(EMULATION):
        if _noting is not None:
            _noting.add(what, make, collective)
        return make()


@dataclass
class StandIns:
    """The work done in place of other ranks in a pass, to be run again separately.

    Attributes:
        in_graph: whether the same step is replayed as a CUDA graph when it is not watched.
    """

    in_graph: bool = False
    _count: Counter[Hashable] = field(default_factory=Counter)
    _make: dict[Hashable, Callable[[], Any]] = field(
        default_factory=dict
    )  # the last one of each name: the others are equal
    _collectives: set[Hashable] = field(default_factory=set)

    def add(self, what: Hashable, make: Callable[[], Any], collective: bool) -> None:
        self._count[what] += 1
        self._make[what] = make
        if collective:
            self._collectives.add(what)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Records the work done in place of other ranks inside the context."""
        global _noting
        before, _noting = _noting, self
        try:
            yield
        finally:
            _noting = before

    @property
    def work(self) -> Hashable:
        """A key that is equal for passes with the same work."""
        return self.in_graph, frozenset(self._count.items())

    @torch.inference_mode()
    def seconds(self, device: torch.device) -> float:
        """Seconds of all this work, run separately: the median of a few runs."""
        run: Callable[[], None] = self._run
        if self.in_graph and device.type == "cuda":
            run = self._captured(device)
        taken = []
        for _ in range(1 + _REPEATS):
            begin = _reached(device)
            run()
            taken.append(_reached(device) - begin)
        return statistics.median(taken[1:])  # the first is slower, as it allocates memory

    def _run(self, only_collectives: bool = False) -> None:
        for what, count in self._count.items():
            if what in self._collectives or not only_collectives:
                for _ in range(count):
                    self._make[what]()

    def _captured(self, device: torch.device) -> Callable[[], None]:
        """Replays the collectives; all other data was made when the step was captured, and a graph only reads it."""
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._run(True)  # once without capture, as for the engine's graphs
            torch.cuda.synchronize(device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._run(True)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay


def _reached(device: torch.device) -> float:
    """Time in seconds at which the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
