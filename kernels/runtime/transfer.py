"""Work beside other work: copies between host and device that the host does not wait for, and side streams.

A copy runs after the earlier work of the device. From ordinary memory it would make the host wait for all of that; from
and to pinned memory it does not, and PyTorch keeps such memory alive until the copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from dsa_engine.kernels.runtime.kernel import as_one, this_thread

Begun = TypeVar("Begun")
Result = TypeVar("Result")

_ALIGNED = 64  # bytes


def upload(values: torch.Tensor, device: torch.device | str, out: torch.Tensor | None = None) -> torch.Tensor:
    """``values``, a CPU tensor, on ``device``, for the work that is given to the current stream from now on.

    With ``out``, a tensor there, they are written to it, once the work before no longer reads it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True) if out is None else out.copy_(values, non_blocking=True)


def upload_together(values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """CPU tensors like :func:`upload`, in one copy."""
    if device.type != "cuda":
        return [*values]
    packed = torch.zeros(sum(-(-x.nbytes // _ALIGNED) * _ALIGNED for x in values), dtype=torch.uint8)
    first, starts = 0, []
    for x in values:
        packed[first : first + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        starts.append(first)
        first += -(-x.nbytes // _ALIGNED) * _ALIGNED
    there = upload(packed, device)
    both = zip(values, starts, strict=True)
    return [there[at : at + x.nbytes].view(x.dtype).view(x.shape) for x, at in both]


def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Starts to bring ``values`` to the host.

    Returns:
        a function that waits for them, but for nothing later, and returns them as a CPU tensor.
    """
    if values.device.type != "cuda":
        return lambda: values
    copy = values.to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))

    def read() -> torch.Tensor:
        done.synchronize()
        return copy

    return read


def download(values: torch.Tensor) -> Callable[[], list[Any]]:
    """Like :func:`to_host`; the values come as nested lists."""
    read: Callable[[], list[Any]] = this_thread.as_one(partial, _listed, this_thread.as_one(to_host, values))
    return read


def _listed(read: Callable[[], torch.Tensor]) -> list[Any]:
    numbers: list[Any] = read().tolist()
    return numbers


class SideStream:
    """A second CUDA stream of a device; on a CPU the same calls run the work in order.

    ``priority``: of its kernels' blocks where multiprocessors become free; the main stream has 0, lower ones are first.
    """

    def __init__(self, device: torch.device, *, priority: int = 0):
        on_side = device.type == "cuda"
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
            joined: Callable[[], Result] = this_thread.as_one(partial, as_one, _join, None, [], work())
            return joined
        current, done = torch.cuda.current_stream(), torch.cuda.Event()
        if not from_mark:
            this_thread.as_one(before.record, current)
        this_thread.as_one(stream.wait_event, before)  # as recorded now: the event serves again
        this_thread.as_one(torch.cuda.set_stream, stream)
        try:
            result = work()
            this_thread.as_one(done.record, stream)
        finally:
            this_thread.as_one(torch.cuda.set_stream, current)
        # No record_stream, which would keep freed memory until a capture ends. The inputs are held until the current
        # stream has waited, so their memory is not reused before. The result's memory belongs to the side stream: its
        # next user there comes after a wait for everything that the current stream was given before, or for a mark.
        joined = this_thread.as_one(partial, as_one, _join, done, [*inputs], result)
        return joined

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


def _join(done: torch.cuda.Event | None, held: list[torch.Tensor], result: Result) -> Result:
    if done is not None:
        torch.cuda.current_stream().wait_event(done)  # not for the stream, which may have later work
    held.clear()
    return result
