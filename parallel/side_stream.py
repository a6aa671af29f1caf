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
    """

    def __init__(self, device: torch.device, *, enabled: bool = True):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and enabled else None
        self._before = None if self._stream is None else torch.cuda.Event()

    def run(self, work: Callable[[], Result], *inputs: torch.Tensor) -> Callable[[], Result]:
        """Starts ``work`` after everything that the current stream has been given so far.

        Args:
            work: returns what the current stream needs of it: tensors, or objects that hold some.
            inputs: the tensors that ``work`` reads and that may be freed before it has ended.

        Returns:
            a function that makes the current stream wait for the result and returns it; called once.
        """
        stream, before = self._stream, self._before
        if stream is None or before is None:
            result = work()
            return lambda: result
        current, done = torch.cuda.current_stream(), torch.cuda.Event()
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
        # next user there comes after a wait for everything that the current stream was given before.
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
