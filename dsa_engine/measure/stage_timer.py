"""Time of a forward pass by stage, and Chrome traces."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from dsa_engine.model.profile_stages import STAGES, set_observer
from dsa_engine.system.output_files import whole_file

# Work done in place of the other ranks of an emulated run: timed like a stage, not part of the rank's own work.
EMULATION = "emulation"

_active: StageTimer | None = None


@contextmanager
def chrome_trace(path: str | Path | None) -> Iterator[None]:
    """Writes a Chrome trace of the work inside the context, by PyTorch's profiler; None: no trace."""
    if path is None:
        yield
        return
    with torch.profiler.profile() as profiler:
        yield
    with whole_file(path) as file:
        try:
            profiler.export_chrome_trace(str(file))
        finally:
            Path(f"{file}.tmp").unlink(missing_ok=True)  # the profiler's file, in case it could not finish
        if not file.exists() or (file.is_file() and not _ends(file)):
            raise OSError("the profiler has not written all of the trace; is the disk full?")


def _ends(trace: Path) -> bool:
    """Whether a trace is complete: the profiler reports no error when a disk is full."""
    if trace.suffix == ".gz":
        return True  # compressed by Python, which reports errors
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")


def current_stage() -> str:
    """The stage that runs now, "other" between stages; "" if no :class:`StageTimer` is running."""
    return "" if _active is None else _active.stage


class DeviceClock:
    """Marks moments of a device's work: with CUDA events on the stream that is current now, or in wall time on a CPU.

    Work on a side stream is not measured; the time that this stream waits for it is.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that the device has reached."""
        return end - begin if self._stream is None else begin.elapsed_time(end) / 1e3


class RetimedClock(DeviceClock):
    """A clock of a pass that was timed on a CPU, on which each stage takes other seconds in all.

    Within a stage time passes in proportion to that on the CPU, so the order of all marks stays.

    Args:
        marks: stages, each with the mark at which it begins.
        factors: by stage; 0 for others.
    """

    def __init__(self, marks: Sequence[tuple[str, float]], factors: Mapping[str, float]):
        super().__init__(torch.device("cpu"))
        self._begins = [mark for _, mark in marks]
        self._factors = [factors.get(name, 0.0) for name, _ in marks]
        lengths = (after - mark for mark, after in pairwise(self._begins))
        self._passed = [0.0, *accumulate(length * factor for length, factor in zip(lengths, self._factors))]

    def seconds(self, begin: Any, end: Any) -> float:
        return self._at(end) - self._at(begin)

    def _at(self, mark: float) -> float:
        number = max(0, bisect_right(self._begins, mark) - 1)
        return self._passed[number] + (mark - self._begins[number]) * self._factors[number]


class StageTimer:
    """Sums the time spent in each stage while it is entered as a context; read ``seconds()`` afterwards.

    On CUDA the time is the device's, on the stream that is current when the timer is made; on a CPU it is wall time.
    """

    def __init__(self, device: torch.device):
        self.clock = DeviceClock(device)
        self._device = device
        self._stack = ["other"]
        self._marks: list[tuple[str, Any]] = []  # a stage and the mark at which it begins

    @property
    def stage(self) -> str:
        """The innermost stage that has been entered."""
        return self._stack[-1]

    @property
    def begin(self) -> Any:
        """The mark at which the timer was entered."""
        return self._marks[0][1]

    def __enter__(self) -> StageTimer:
        global _active
        set_observer(self)
        _active = self
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        self._stack.append("")  # the time up to the next entry belongs to no stage
        self._mark()
        self._stack.pop()
        set_observer(None)
        _active = None

    def enter(self, name: str) -> None:
        if name not in STAGES and name != EMULATION:
            raise ValueError(f"{name!r} is no stage; stages are {', '.join(STAGES)}")
        self._stack.append(name)
        self._mark()

    def leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._marks.append((self._stack[-1], self.clock.mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds in every stage; "other" is the time between stages, "emulation" is there if a rank was emulated."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        total = dict.fromkeys((*STAGES, "other"), 0.0)
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                total[name] = total.get(name, 0.0) + self.clock.seconds(begin, end)
        return total

    def retimed(self, seconds: Mapping[str, float]) -> RetimedClock:
        """The clock on which the stages of this pass, timed on a CPU, take ``seconds`` in all, and others none."""
        taken = self.seconds()
        factors = {name: wanted / taken[name] for name, wanted in seconds.items() if taken.get(name)}
        return RetimedClock(self._marks, factors)


def mean_stages(several: list[dict[str, float]]) -> dict[str, float]:
    """Seconds in each stage, averaged over ranks or repeats."""
    return {name: statistics.fmean(stages[name] for stages in several) for name in several[0]}


def milliseconds(stages: dict[str, float]) -> dict[str, float]:
    """Milliseconds in each stage, as reports have them."""
    return {name: s * 1e3 for name, s in stages.items()}
