"""Pages from rank to rank of a context-parallel group: one collective a layer, under the layer before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch

from dsa_engine.engine.cache.copy_stream import CopyStream
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.parallel.group import Group


def exchange_bytes(largest: int, max_exchanged: int) -> int:
    """Device memory of the buffers, by the bytes of the largest page of a layer (latent rows and index keys)."""
    return 2 * max_exchanged * (2 * largest + torch.int64.itemsize)


class PageExchange:
    """Sends and fills pages, layer by layer.

    Packing and storing run in order on a stream of their own, which waits for a layer's collective before it stores.
    Two layers have buffers in turn: while one layer's pages are on the way, those of the layer before are stored.

    Attributes:
        bytes_sent: bytes sent to other ranks so far.
    """

    def __init__(self, pools: list[list[torch.Tensor]], group: Group, max_exchanged: int):
        first = pools[0][0]
        largest = max(sum(pool.shape[1] for pool in layer) for layer in pools)
        self._pools, self._group, self._max = pools, group, max_exchanged
        self._stream = CopyStream(first.device)
        self._outgoing = first.new_empty(2, max_exchanged * largest)
        self._incoming = first.new_empty(2, max_exchanged * largest)
        self._numbers = first.new_empty(2, max_exchanged, dtype=torch.int64)
        self._arriving = self._started = len(pools)  # the layers that arrive and start next
        self._wait: Callable[[], None] = lambda: None  # for the layer that arrives next
        self.bytes_sent = 0

    def start(self, sends: list[list[int]], receives: list[list[int]], join: Callable[[int], None]) -> None:
        """Starts the exchange of the first layer.

        Args:
            sends, receives: see :class:`.PageMoves`.
            join: makes the current stream wait until a layer's pages can be read and written.
        """
        self._send, self._receive = ([len(pages) for pages in theirs] for theirs in (sends, receives))
        for verb, counts in (("sends", self._send), ("receives", self._receive)):
            if len(counts) != self._group.size or sum(counts) > self._max:
                raise ValueError(
                    f"a step {verb} {counts} pages; there are {self._group.size} ranks, and at most {self._max} pages"
                )
        self._join = join
        self._stream.follow_current()
        with self._stream.active():
            numbers = [torch.tensor([*chain(*pages)], dtype=torch.int64) for pages in (sends, receives)]
            self._sent, self._filled = (
                upload(its, into.device, into[: len(its)]) for its, into in zip(numbers, self._numbers, strict=True)
            )
        self._arriving = self._started = 0
        self._start_next()

    def arrive(self, layer: int) -> None:
        """Starts the exchange of the next layer; makes the current stream wait for the pages of this one, and of all
        layers before it."""
        while self._arriving <= layer and self._arriving < len(self._pools):
            wait, number = self._wait, self._arriving
            self._arriving += 1
            self._start_next()
            with self._stream.active():
                wait()
                columns = 0
                rows = self._rows(self._incoming, number, len(self._filled))
                for pool in self._pools[number]:
                    pool.index_copy_(0, self._filled, rows[:, columns : columns + pool.shape[1]])
                    columns += pool.shape[1]
            self._stream.mark().join()

    def _start_next(self) -> None:
        if self._started == len(self._pools):
            return
        layer, self._started = self._started, self._started + 1
        with self._stream.active():
            self._join(layer)
            outgoing = self._rows(self._outgoing, layer, len(self._sent))
            columns = 0
            for pool in self._pools[layer]:
                torch.index_select(pool, 0, self._sent, out=outgoing[:, columns : columns + pool.shape[1]])
                columns += pool.shape[1]
            before = self._group.bytes_sent
            incoming = self._rows(self._incoming, layer, len(self._filled))
            self._wait = self._group.all_to_all_async(outgoing, incoming, self._send, self._receive)
            self.bytes_sent += self._group.bytes_sent - before

    def _rows(self, buffers: torch.Tensor, layer: int, count: int) -> torch.Tensor:
        """``[count, words of a page of the layer]`` of one of two buffers."""
        width = sum(pool.shape[1] for pool in self._pools[layer])
        return buffers[layer % 2, : count * width].view(count, width)
