"""Work on a second stream, beside the main one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Begun = TypeVar("Begun")
Result = TypeVar("Result")


class SideStream:
    """A second CUDA stream of a device; on a CPU, or if disabled, the same calls run the work in order.

    Args:
        enabled: False runs the work on the current stream, to measure the gain of the overlap.
        priority: of its kernels' blocks where multiprocessors become free; the main stream has 0, lower ones are first.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True, priority: int = 0):
        on_side = device.type == "cuda" and enabled
        self._stream = torch.cuda.Stream(device, priority=priority) if on_side else None
        self._before = torch.cuda.Event() if on_side else None
        self._marked = torch.cuda.Event() if on_side else None

    def mark(self) -> None:
        """Marks what the current stream has been given so far, for :meth:`run` with ``from_mark``. Work from a mark may
        take the memory of results that were freed before, so there is a new mark after the last use of each."""
        if self._marked is not None:
            self._marked.record()

    def run(self, work: Callable[[], Result], *inputs: torch.Tensor, from_mark: bool = False) -> Callable[[], Result]:
        """Starts ``work`` after everything that the current stream has been given so far.

        Args:
            from_mark: … that it had been given at the last :meth:`mark`, beside all that was launched since.
            work: returns what the current stream needs of it: tensors, or objects that hold some.
            inputs: the tensors that ``work`` reads and that may be freed before it has ended.

        Returns:
            a function that makes the current stream wait for the result and returns it; called once.
        """
        stream, before = self._stream, self._marked if from_mark else self._before
        if stream is None or before is None:
            result = work()
            return lambda: result
        current, done = torch.cuda.current_stream(), torch.cuda.Event()
        if not from_mark:
            before.record(current)
        stream.wait_event(before)  # as recorded now: the event serves again
        torch.cuda.set_stream(stream)
        try:
            result = work()
            done.record(stream)
        finally:
            torch.cuda.set_stream(current)
        # No record_stream, which would keep freed memory until a capture ends. The inputs are held until the current
        # stream has waited, so their memory is not reused before. The result's memory belongs to the side stream: its
        # next user there comes after a wait for everything that the current stream was given before, or for a mark.
        held = list(inputs)

        def join() -> Result:
            torch.cuda.current_stream().wait_event(done)  # not for the stream, which may have later work
            held.clear()
            return result

        return join

    def relay(
        self, start: Callable[[], Begun], follow: Callable[[Begun], Result], *inputs: torch.Tensor
    ) -> Callable[[], Result]:
        """Starts a transfer, and what follows it as soon as it has come.

        On a CPU, what follows runs when it is waited for: the host would have to wait for the transfer.

        Args:
            start: starts the transfer.
            follow: waits for the transfer; it is given what ``start`` returns.
            inputs: as in :meth:`run`.
        """
        if self._stream is not None:
            return self.run(lambda: follow(start()), *inputs)
        begun = start()
        return lambda: follow(begun)
