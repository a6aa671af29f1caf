"""Work that runs beside the main stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result", bound="torch.Tensor | tuple[torch.Tensor, ...]")


class SideStream:
    """A second CUDA stream of this device; on a CPU, or turned off, the same calls run the work in order.

    Args:
        device: where the work runs.
        enabled: False to run it on the current stream, so that the gain of the overlap can be measured.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and enabled else None

    def run(self, work: Callable[[], Result], *inputs: torch.Tensor) -> Callable[[], Result]:
        """Starts ``work`` after all that the current stream has been given so far.

        Args:
            work: returns a tensor or a tuple of tensors.
            inputs: the tensors that it reads and that may be freed before it has ended.

        Returns:
            a function that makes the current stream wait for the result and returns it; to be called once.
        """
        if self._stream is None:
            result = work()
            return lambda: result
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = work()
        # No record_stream, which would keep freed memory until a capture ends. The inputs' memory is not given out
        # again before the current stream has waited, as they are held until then. The result's belongs to the side
        # stream, where whoever gets it next comes after a wait for all that the current stream was given before.
        held = list(inputs)

        def join() -> Result:
            torch.cuda.current_stream().wait_stream(stream)
            held.clear()
            return result

        return join
