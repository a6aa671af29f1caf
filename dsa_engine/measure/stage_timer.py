"""Time of a forward pass by stage, and Chrome traces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dsa_engine.model.profile_stages import STAGES, set_hook
from dsa_engine.system.output_files import whole_file


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


class StageTimer:
    """Sums the time spent in each stage while it is entered as a context; read ``seconds()`` afterwards.

    On CUDA the time is the device's, by events on the stream that is current when the timer is made: work on a side
    stream is not measured, the time that this stream waits for it is. On a CPU it is wall time. Between stages the
    device waits for the host while steps are timed, as each is read at once: "host" is the part of that time in which
    this thread ran.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._stack = ["other"]
        self._marks: list[tuple[str, Any, float]] = []  # a stage, the mark at which it begins, this thread's time

    @property
    def stage(self) -> str:
        """The innermost stage that has been entered."""
        return self._stack[-1]

    def __enter__(self) -> StageTimer:
        set_hook(self)
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.append("")  # the time up to the next entry belongs to no stage
        self._mark()
        self._stack.pop()
        set_hook(None)

    def enter(self, name: str) -> None:
        if name not in STAGES:
            raise ValueError(f"{name!r} is no stage; stages are {', '.join(STAGES)}")
        self._stack.append(name)
        self._mark()

    def leave(self) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        moment: Any = time.perf_counter()
        if self._stream is not None:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(self._stream)
        self._marks.append((self._stack[-1], moment, time.thread_time()))

    def seconds(self) -> dict[str, float]:
        """Seconds in every stage; "host" is this thread's processor time between stages, "other" the remainder."""
        if self._stream is not None:
            torch.cuda.synchronize()
        total, host = dict.fromkeys((*STAGES, "host", "other"), 0.0), 0.0
        for (name, begin, ran), (_, end, has_run) in zip(self._marks, self._marks[1:], strict=False):
            if name:
                total[name] += end - begin if self._stream is None else begin.elapsed_time(end) / 1e3
            host += (has_run - ran) * (name == "other")
        total["host"] = min(host, total["other"])
        total["other"] -= total["host"]
        return total


def mean_stages(several: list[dict[str, float]]) -> dict[str, float]:
    """Seconds in each stage, averaged over ranks or repeats."""
    return {name: statistics.fmean(stages[name] for stages in several) for name in several[0]}
