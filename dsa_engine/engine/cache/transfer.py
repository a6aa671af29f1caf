"""A rank's pages between device and host memory and between ranks, beside the steps that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from dsa_engine.engine.cache.host import HostCopies, HostPages
from dsa_engine.engine.cache.pool import PageMoves
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.parallel.group import Group


class PageTransfer:
    """Moves pages of ``cache`` before a step's layers read them.

    In a step: :meth:`begin`, then the forward pass, whose layers call :meth:`arrive`, or a CUDA graph after
    :meth:`finish`. All of this runs on one thread. On a CPU copies are done at once; exchanges overlap there too.

    Args:
        max_exchanged: maximum number of pages that a rank sends, and that it receives, in a step; 0: no exchanges.
    """

    def __init__(self, cache: KVCache, group: Group, host: HostPages | None, max_exchanged: int):
        pools = cache.page_words()
        self.host, self._layers = host, len(pools)
        self.copies = HostCopies(pools, host) if host else None
        self._exchange = PageExchange(pools, group, max_exchanged) if max_exchanged else None
        self._under_way = False  # whether there may be moves that a layer has to wait for
        cache.before_use.append(self.arrive)

    @torch.inference_mode()
    def begin(self, moves: PageMoves) -> None:
        """Starts a step's moves, or copies between two steps, after all work that the current stream has been given."""
        if moves.copies:
            assert self.copies is not None, "copies need host memory"
            self.copies.start(moves.copies)
            self._under_way = True
        if moves.exchanges:
            assert self._exchange is not None, "ranks that exchange pages need buffers"
            self._exchange.start(moves.sends, moves.receives, self.copies.join if self.copies else lambda layer: None)
            self._under_way = True

    def arrive(self, layer: int) -> None:
        """Makes the current stream wait for the moves of a layer; starts the exchange of the next layer before."""
        if self._under_way and self._exchange is not None:
            self._exchange.arrive(layer)
        if self._under_way and self.copies is not None:
            self.copies.join(layer)

    @torch.inference_mode()
    def finish(self) -> None:
        """Makes the current stream wait for the moves of all layers: after an eager step, also one that failed, and
        before a CUDA graph."""
        for layer in range(self._layers if self._under_way else 0):
            self.arrive(layer)
        self._under_way = False

    @property
    def copied(self) -> Callable[[], None]:
        """A function that blocks until all copies so far are done; any thread may call it."""
        assert self.copies is not None, "copies need host memory"
        return self.copies.wait


def exchange_bytes(largest: int, max_exchanged: int) -> int:
    """Device memory of :class:`PageExchange`, by the bytes of the largest page of a layer (latent rows and index
    keys)."""
    return 2 * max_exchanged * (2 * largest + torch.int64.itemsize)


class PageExchange:
    """Pages from rank to rank of a context-parallel group: one collective a layer, under the layer before.

    Packing and storing run in order on a stream of their own, which waits for a layer's collective before it stores.
    Two layers have buffers, alternating: while one layer's pages are on the way, those of the layer before are stored.
    """

    def __init__(self, pools: list[list[torch.Tensor]], group: Group, max_exchanged: int):
        first = pools[0][0]
        largest = max(sum(pool.shape[1] for pool in layer) for layer in pools)
        self._pools, self._group = pools, group
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
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
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
        """``[pages, words of a page of the layer]`` of one of two buffers."""
        pages, width = sum(counts), sum(pool.shape[1] for pool in self._pools[layer])
        return buffers[layer % 2, : pages * width].view(pages, width)


def pack(pools: Sequence[torch.Tensor], pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies pages of a layer into ``rows [n, words]``, a page's words of all pools side by side."""
    for pool, part in zip(pools, _columns(pools, rows), strict=True):
        torch.index_select(pool, 0, pages, out=part)


def unpack(pools: Sequence[torch.Tensor], pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Fills pages of a layer with what :func:`pack` has made."""
    for pool, part in zip(pools, _columns(pools, rows), strict=True):
        pool.index_copy_(0, pages, part)


def _columns(pools: Sequence[torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.split([pool.shape[1] for pool in pools], dim=1)
