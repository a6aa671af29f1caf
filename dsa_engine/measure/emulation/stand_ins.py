"""What stands in for the other ranks of an emulated one, and how long that takes.

It is no part of the rank's work, so its time is taken off a measured run. How much that is cannot be seen in the run
itself: a step that is replayed as a graph has no stages, and to watch one costs time of its own. So one more run writes
down what stood in, and then that alone is run again, in the way in which the measured step ran it.
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
    """What ``make`` returns, in place of what other ranks would have sent.

    Args:
        what: names the work: under one name it is always as much.
        make: may be called again later.
        collective: of a collective: it waits for nothing, so that a CUDA graph can hold it.
    """
    with stage(EMULATION):
        if _noting is not None:
            _noting.add(what, make, collective)
        return make()


@dataclass
class StandIns:
    """What stood in for other ranks in a pass, to be run again alone.

    Attributes:
        in_graph: whether the same step, when nobody watches, is replayed as a CUDA graph.
    """

    in_graph: bool = False
    _count: Counter[Hashable] = field(default_factory=Counter)
    _make: dict[Hashable, Callable[[], Any]] = field(
        default_factory=dict
    )  # of one name the last: the others are like it
    _collectives: set[Hashable] = field(default_factory=set)

    def add(self, what: Hashable, make: Callable[[], Any], collective: bool) -> None:
        self._count[what] += 1
        self._make[what] = make
        if collective:
            self._collectives.add(what)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within, all that stands in is written down."""
        global _noting
        before, _noting = _noting, self
        try:
            yield
        finally:
            _noting = before

    @property
    def work(self) -> Hashable:
        """Equal for passes in which as much stood in, in the same way."""
        return self.in_graph, frozenset(self._count.items())

    @torch.inference_mode()
    def seconds(self, device: torch.device) -> float:
        """Of all of it, alone: the median of a few runs."""
        run: Callable[[], None] = self._run
        if self.in_graph and device.type == "cuda":
            run = self._captured(device)
        taken = []
        for _ in range(1 + _REPEATS):
            begin = _reached(device)
            run()
            taken.append(_reached(device) - begin)
        return statistics.median(taken[1:])  # the first is slower, where memory is asked for

    def _run(self, only_collectives: bool = False) -> None:
        for what, count in self._count.items():
            if what in self._collectives or not only_collectives:
                for _ in range(count):
                    self._make[what]()

    def _captured(self, device: torch.device) -> Callable[[], None]:
        """Replays the collectives; all else was made up when the step was captured, and a graph only reads it."""
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._run(True)  # once without capturing, as the engine's graphs are
            torch.cuda.synchronize(device)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._run(True)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay


def _reached(device: torch.device) -> float:
    """Seconds, when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
