"""A rank's pages to and from the other ranks of its group, beside the steps that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.pages.page_map import MovedPages, PageMap, PageWords
from dsa_engine.parallel.group import Group


def exchange_bytes(largest: int, max_exchanged: int) -> int:
    """Device memory of :class:`PageExchange`, by the bytes of the largest page of a layer (latent rows and index
    keys)."""
    return 2 * max_exchanged * (2 * largest + torch.int64.itemsize)


class PageExchange:
    """Pages from rank to rank of a context-parallel group: one collective a layer, under the layer before.

    Packing and storing run in order on a stream of their own, which waits for a layer's collective before it stores.
    Two layers have buffers, alternating: while one layer's pages are on the way, those of the layer before are stored.
    """

    def __init__(self, page_map: PageMap, group: Group, max_exchanged: int):
        pools = page_map.layers
        first = pools[0][0].on_device
        largest = max(sum(pool.width for pool in layer) for layer in pools)
        self._map, self._pools, self._group = page_map, pools, group
        self._cuda = torch.get_device_module(first.device)  # on a CPU torch.cpu, whose streams do nothing
        self._stream = self._cuda.Stream(first.device)
        self._outgoing = first.new_empty(2, max_exchanged * largest)
        self._incoming = first.new_empty(2, max_exchanged * largest)
        self._numbers = first.new_empty(2, max_exchanged, dtype=torch.int64)
        self._arriving = self._started = len(pools)  # the layers that arrive and start next
        self._wait: Callable[[], None] = lambda: None  # for the layer that arrives next

    def start(self, sends: list[list[int]], receives: list[list[int]], join: Callable[[int], None]) -> None:
        """Starts the exchange of the first layer. ``join``: makes the current stream wait until a layer's pages can be
        read and written."""
        self._send, self._receive = ([len(pages) for pages in theirs] for theirs in (sends, receives))
        self._join = join
        self._map.overwrite([*chain(*receives)])
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            self._sent, self._filled = (
                self._map.moved(its, upload(torch.tensor(its, dtype=torch.int64), into.device, into[: len(its)]))
                for its, into in zip(([*chain(*sends)], [*chain(*receives)]), self._numbers, strict=True)
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
            with self._cuda.stream(self._stream):
                wait()
                unpack(self._pools[number], self._filled, self._rows(self._incoming, number, self._receive))
            self._cuda.current_stream().wait_stream(self._stream)

    def _start_next(self) -> None:
        if self._started == len(self._pools):
            return
        layer, self._started = self._started, self._started + 1
        with self._cuda.stream(self._stream):
            self._join(layer)
            outgoing = self._rows(self._outgoing, layer, self._send)
            incoming = self._rows(self._incoming, layer, self._receive)
            pack(self._pools[layer], self._sent, outgoing)
            self._wait = self._group.all_to_all_async(outgoing, incoming, self._send, self._receive)

    def _rows(self, buffers: torch.Tensor, layer: int, counts: list[int]) -> torch.Tensor:
        """``[pages, words of a page of the layer]``."""
        pages, width = sum(counts), sum(pool.width for pool in self._pools[layer])
        return buffers[layer % 2, : pages * width].view(pages, width)


def pack(pools: Sequence[PageWords], pages: MovedPages, rows: torch.Tensor) -> None:
    """Copies pages of a layer into ``rows [n, words]``, a page's words of all pools side by side."""
    for pool, part in zip(pools, _columns(pools, rows), strict=True):
        pool.read(pages, part)


def unpack(pools: Sequence[PageWords], pages: MovedPages, rows: torch.Tensor) -> None:
    for pool, part in zip(pools, _columns(pools, rows), strict=True):
        pool.write(pages, part)


def _columns(pools: Sequence[PageWords], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.split([pool.width for pool in pools], dim=1)
