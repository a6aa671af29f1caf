"""Work on a second stream, beside the main one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result", bound="torch.Tensor | tuple[torch.Tensor, ...]")


class SideStream:
    """A second CUDA stream of a device; on a CPU, or if disabled, the same calls run the work in order.

    Args:
        enabled: False runs the work on the current stream, to measure the gain of the overlap.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and enabled else None

    def run(self, work: Callable[[], Result], *inputs: torch.Tensor) -> Callable[[], Result]:
        """Starts ``work`` after everything that the current stream has been given so far.

        Args:
            work: returns a tensor or a tuple of tensors.
            inputs: the tensors that ``work`` reads and that may be freed before it has ended.

        Returns:
            a function that makes the current stream wait for the result and returns it; called once.
        """
        if self._stream is None:
            result = work()
            return lambda: result
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = work()
        # No record_stream, which would keep freed memory until a capture ends. The inputs are held until the current
        # stream has waited, so their memory is not reused before. The result's memory belongs to the side stream: its
        # next user there comes after a wait for everything that the current stream was given before.
        held = list(inputs)

        def join() -> Result:
            torch.cuda.current_stream().wait_stream(stream)
            held.clear()
            return result

        return join
