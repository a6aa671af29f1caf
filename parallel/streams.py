"""Work that runs beside the main stream."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A second CUDA stream of this device; on a CPU the same calls run the work in order."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts ``work(x)`` after all that the current stream has been given so far.

        Returns:
            a function that makes the current stream wait for the result and returns it.
        """
        if self._stream is None:
            result = work(x)
            return lambda: result
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = work(x)
        x.record_stream(stream)  # the allocator must not hand x out again while the side stream reads it

        def join() -> torch.Tensor:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            result.record_stream(current)
            return result

        return join
