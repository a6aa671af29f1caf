"""Work on a second stream, beside the main one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from dsa_engine.parallel.collective_log import CollectiveLog

Begun = TypeVar("Begun")
Result = TypeVar("Result")


class SideStream:
    """A second CUDA stream of a device; on a CPU, or if disabled, the same calls run the work in order.

    Args:
        enabled: False runs the work on the current stream, to measure the gain of the overlap.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and enabled else None

    def run(
        self, work: Callable[[], Result], *inputs: torch.Tensor, log: CollectiveLog | None = None
    ) -> Callable[[], Result]:
        """Starts ``work`` after everything that the current stream has been given so far.

        Args:
            work: returns what the current stream needs of it: tensors, or objects that hold some.
            inputs: the tensors that ``work`` reads and that may be freed before it has ended.
            log: records where the work begins and is waited for.

        Returns:
            a function that makes the current stream wait for the result and returns it; called once.
        """
        task, stream = _Task(log), self._stream
        if stream is None:
            with task.part():
                result = work()

            def ended() -> Result:
                task.join()
                return result

            return ended
        stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()
        with torch.cuda.stream(stream), task.part():
            result = work()
            done.record(stream)
        # No record_stream, which would keep freed memory until a capture ends. The inputs are held until the current
        # stream has waited, so their memory is not reused before. The result's memory belongs to the side stream: its
        # next user there comes after a wait for everything that the current stream was given before.
        held = list(inputs)

        def join() -> Result:
            torch.cuda.current_stream().wait_event(done)  # not for the stream, which may have later work
            held.clear()
            task.join()
            return result

        return join

    def relay(
        self,
        start: Callable[[], Begun],
        follow: Callable[[Begun], Result],
        *inputs: torch.Tensor,
        log: CollectiveLog | None = None,
    ) -> Callable[[], Result]:
        """Starts a transfer, and what follows it as soon as it has come.

        On a CPU, what follows runs when it is waited for: the host would have to wait for the transfer.

        Args:
            start: starts the transfer.
            follow: waits for the transfer; it is given what ``start`` returns.
            inputs, log: as in :meth:`run`.
        """
        if self._stream is not None:
            return self.run(lambda: follow(start()), *inputs, log=log)
        task = _Task(log)
        with task.part():
            begun = start()

        def join() -> Result:
            with task.part():
                result = follow(begun)
            task.join()
            return result

        return join


class _Task:
    """Work on a side stream, in a log if there is one."""

    def __init__(self, log: CollectiveLog | None):
        self._log, self._number = log, log.fork() if log else 0

    def part(self) -> AbstractContextManager[None]:
        return self._log.part(self._number) if self._log else nullcontext()

    def join(self) -> None:
        if self._log:
            self._log.join(self._number)
