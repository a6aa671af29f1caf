"""A stream for copies, with marks for which other streams and the host wait."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Mark:
    """A point in the work of a stream; on a CPU it is always reached."""

    def __init__(self, event: torch.cuda.Event | None = None):
        self._event = event

    def join(self) -> None:
        """Makes the current stream wait until the mark is reached."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def block(self) -> None:
        """Blocks the calling thread until the mark is reached; any thread may call it."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """A CUDA stream of its own; on a CPU its work runs in order with all other work."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow_current(self) -> None:
        """Makes the stream's later work wait for everything that the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def active(self) -> AbstractContextManager[object]:
        """A context in which this is the current stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """The end of all work that the stream has been given so far."""
        if self._stream is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)
