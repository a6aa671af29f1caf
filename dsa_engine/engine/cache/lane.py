"""Work in an order of its own, beside the steps: a stream on CUDA, a thread on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class Job:
    """Work given to a lane."""

    def __init__(self, work: Callable[[], object]):
        self.work = work
        self.event: torch.cuda.Event | None = None  # its end, on CUDA
        self.ended = False
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the work has ended.

        Raises:
            BaseException: the work failed, with this error.
        """
        if self.error is not None:
            raise self.error
        return self.ended if self.event is None else self.event.query()


class Lane:
    """Runs work in the order in which it is given; the caller never waits.

    On CUDA the work is launched at once, on a stream of its own, after what the current stream has been given so far.
    On a CPU a thread runs it, so it may block; an error ends the lane.
    """

    def __init__(self, device: torch.device, name: str):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name

    def run(self, work: Callable[[], object]) -> Job:
        """Starts work after all that the lane and the current stream have been given before."""
        job = Job(work)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), torch.inference_mode():
                work()
                job.event = torch.cuda.Event()
                job.event.record(self._stream)
            return job
        if self._thread is None:
            self._thread = threading.Thread(target=self._work_off, name=f"dsa_engine {self._name}", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Waits for all work and ends the thread."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    @torch.inference_mode()
    def _work_off(self) -> None:
        error: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            if error is None:
                try:
                    job.work()
                except BaseException as raised:
                    error = raised
            job.error, job.ended = error, True
