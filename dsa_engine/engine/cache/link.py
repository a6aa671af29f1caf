"""Pages from the ranks that prefill to those that decode, under the steps of both.

A link is a thread for one other rank, so a rank that is late delays neither the steps of the other nor other links.
Hosts agree before the device gets anything: the sender's waits until a layer is stored and says how many are by then,
the receiver's answers when its buffer is free, and only then both launch. No kernel waits for a rank that may be late,
and each receiver has one message under way, which its sender is about to send: there is no circle of ranks that wait.
A message takes the layers that are stored, if they fit: no layer waits for another one, and after a prefill that is
faster than its messages few of them remain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.cache.exchange import pack, unpack
from dsa_engine.engine.requests.samples import Ints
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.kv_cache import KVCache, pool_page_bytes
from dsa_engine.model.pages.page_map import PageMap
from dsa_engine.parallel.disaggregation import PageGroups

# A layer of 128K tokens from 8 ranks, in bfloat16, is one message. Both ranks of a link cut pages by this.
_MESSAGE_BYTES = 24 << 20

Done = Callable[[], bool]  # whether work has ended; raises its error


class RankPages(NamedTuple):
    """Pages that go to a rank, or come from it."""

    id: int  # the caller's
    rank: int  # number of the other rank in the run
    pages: list[int]  # numbers in this rank's pools


def by_rank(id: int, pages: Ints, ours: npt.NDArray[np.bool_], ranks: Ints) -> list[RankPages]:
    """Those of a request's pages that are ``ours``, by the other rank of each; also of ranks that have none."""
    return [RankPages(id, rank, pages[ours & (ranks == rank)].tolist()) for rank in np.unique(ranks).tolist()]


class _Carrier:
    """The buffer, stream and communicator of a rank, which its links use in turn."""

    def __init__(self, page_map: PageMap, groups: PageGroups, sends: bool):
        pools = page_map.layers
        first = pools[0][0].on_device
        self._widths = [sum(pool.width for pool in layer) for layer in pools]
        largest = max(self._widths)
        self._map, self._pools, self._groups, self._sends = page_map, pools, groups, sends
        self._pages = _message_pages(largest * first.element_size())
        self._buffer = first.new_empty(self._pages * largest)
        self._numbers = first.new_empty(self._pages, dtype=torch.int64)
        self._cuda = torch.get_device_module(first.device)  # on a CPU torch.cpu, whose streams and events do nothing
        self._stream = self._cuda.Stream(first.device)
        self._event = partial(self._cuda.Event, blocking=True) if first.is_cuda else self._cuda.Event
        self._lock = threading.Lock()

    def end(self) -> Any:
        """An event at the end of what the current stream has been given so far; a thread that waits for it sleeps."""
        event = self._event()
        event.record()
        return event

    def move(self, layers: range, pages: Sequence[int], rank: int) -> int:
        """Sends pages of the first of these layers, as many as fit into a message, or fills those that the sender
        names, when both ranks are ready; returns their number when that is done."""
        host, word = self._groups.host, torch.zeros(1, dtype=torch.int64)
        if self._sends:
            sizes = accumulate(self._widths[layer] * len(pages) for layer in layers)
            count = max(1, sum(size <= len(self._buffer) for size in sizes))
            host.send(word + count, rank)
            host.recv(word, rank)
            with self._lock:  # whose holder's receiver has launched, so it ends
                self._carry(layers[:count], pages, rank)
        else:
            count = int(host.recv(word, rank))
            with self._lock:
                host.send(word, rank)
                self._carry(layers[:count], pages, rank)
        return count

    def _carry(self, layers: range, pages: Sequence[int], rank: int) -> None:
        device = self._groups.device
        with self._cuda.stream(self._stream), torch.inference_mode():
            for first in range(0, len(pages), self._pages):
                some = pages[first : first + self._pages]
                numbers = torch.tensor(some, dtype=torch.int64)
                moved = self._map.moved(some, upload(numbers, self._numbers.device, self._numbers[: len(some)]))
                sizes = [len(some) * self._widths[layer] for layer in layers]
                message = self._buffer[: sum(sizes)]
                parts = [rows.view(len(some), -1) for rows in message.split(sizes)]
                if self._sends:
                    for layer, rows in zip(layers, parts, strict=True):
                        pack(self._pools[layer], moved, rows)
                    device.exchange([(message, rank)], [])
                else:
                    device.exchange([], [(message, rank)])
                    for layer, rows in zip(layers, parts, strict=True):
                        unpack(self._pools[layer], moved, rows)
            self.end().synchronize()


class _Job(NamedTuple):
    """Pages of layers that a link moves after an event."""

    layers: range
    pages: Sequence[int]
    after: Any


class PageLink:
    """Sends pages to a rank, or receives them, in the order of the calls; the caller never waits. After an error
    nothing more is moved. ``done``: whether the work of the calls so far has ended; later calls replace it."""

    def __init__(self, carrier: _Carrier, rank: int):
        self._carrier, self._rank = carrier, rank
        self._work: Queue[_Job | None] = Queue()
        self._given = self._ended = 0  # calls
        self._error: BaseException | None = None
        # It may wait for ever for another rank, so it does not keep the process alive.
        self._thread = threading.Thread(target=self._work_off, name="dsa_engine pages", daemon=True)
        self._thread.start()
        self.done: Done = lambda: True

    def move(self, layers: range, pages: Sequence[int], after: Any) -> None:
        """Sends these pages of layers as they are after an event, or fills them then. Layers that follow those of the
        call before are of the same pages."""
        self._given += 1
        self._work.put(_Job(layers, pages, after))
        self.done = partial(self._has_ended, self._given)

    def close(self) -> None:
        """Waits for all work, and ends the thread."""
        self._work.put(None)
        self._thread.join()

    def _has_ended(self, number: int) -> bool:
        if self._ended < number and self._error is not None:
            raise self._error
        return self._ended >= number

    def _work_off(self) -> None:
        while (job := self._work.get()) is not None:
            if self._error is not None:
                continue
            layers, pages, after = job
            calls = 1
            try:
                after.synchronize()
                while layers:
                    while (then := self._stored(layers.stop)) is not None:
                        layers, calls = range(layers.start, then.layers.stop), calls + 1
                    layers = layers[self._carrier.move(layers, pages, self._rank) :]
                self._ended += calls
            except BaseException as raised:
                self._error = raised

    def _stored(self, layer: int) -> _Job | None:
        """The next work, if it begins with this layer, whose pages can be moved."""
        then: _Job | None = self._work.queue[0] if self._work.queue else None
        return self._work.get() if then and then.layers.start == layer and then.after.query() else None


class _Transfers:
    """Pages on their way over the links of this rank. ``bytes_moved``: bytes of all transfers that have ended."""

    _sends: bool

    def __init__(self, cache: KVCache, groups: PageGroups):
        self._page_bytes, self._layers = cache.page_bytes, len(cache.latent)
        self._carrier = _Carrier(cache.page_map, groups, self._sends)
        self._links: dict[int, PageLink] = {}  # by the other rank's number in the run
        self._under_way: list[tuple[list[RankPages], Done]] = []
        self.bytes_moved = 0

    @staticmethod
    def device_bytes(config: ModelConfig, format: CacheFormat, page_size: int) -> int:
        """Device memory of the buffer; ``config`` with its MTP modules."""
        largest = max(map(sum, pool_page_bytes(config, format, page_size)))
        return _message_pages(largest) * (largest + torch.int64.itemsize)

    def poll(self) -> list[RankPages]:
        """Those that have ended since the last call, without waiting."""
        done = [is_done() for _, is_done in self._under_way]
        ended = [move for (moves, _), its in zip(self._under_way, done, strict=True) if its for move in moves]
        self._under_way = [one for one, its in zip(self._under_way, done, strict=True) if not its]
        self.bytes_moved += self._page_bytes * sum(len(move.pages) for move in ended)
        return ended

    def close(self) -> None:
        """Waits until all transfers have ended."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def _by_link(self, moves: Iterable[RankPages]) -> Iterator[tuple[PageLink, list[RankPages], list[int]]]:
        """For each link its moves, and their pages. Moves without pages have ended."""
        of_rank: dict[int, list[RankPages]] = {}
        for move in moves:
            if move.pages:
                of_rank.setdefault(move.rank, []).append(move)
            else:
                self._under_way.append(([move], lambda: True))
        for rank, its in of_rank.items():
            if rank not in self._links:
                self._links[rank] = PageLink(self._carrier, rank)
            yield self._links[rank], its, [page for move in its for page in move.pages]


class PageSender(_Transfers):
    """Sends pages of ``cache``. In a step: :meth:`begin`, the forward pass, whose layers call :meth:`arrive` when they
    have stored their rows, and :meth:`finish`. Nothing of this waits for another rank.

    Without a step, ``begin`` and ``finish`` send all layers at once. Pages must stay as they are until :meth:`poll`
    returns them. Each ``begin`` corresponds to one ``PageReceiver.post`` on every rank that it names, with the same
    numbers of pages in the same order, and two ranks make all of these calls in the same order. So many ``layers`` call
    ``arrive``; those of MTP modules, which run several times in a step, are sent by ``finish``.
    """

    _sends = True

    def __init__(self, cache: KVCache, groups: PageGroups, layers: int):
        super().__init__(cache, groups)
        self._main_layers = layers
        self._step: list[tuple[PageLink, list[RankPages], list[int]]] = []  # what the step sends that runs now
        self._next = 0  # the layer that is sent next
        cache.after_store.append(self.arrive)

    def begin(self, sends: Iterable[RankPages]) -> None:
        """Begins a step that sends pages: those that it fills, or others."""
        self._step, self._next = list(self._by_link(sends)), 0

    def arrive(self, layer: int) -> None:
        """Lets a layer be sent, whose rows the current stream has been given to store, and all layers before it."""
        if layer < self._main_layers:
            self._send_until(layer + 1)

    def finish(self) -> None:
        """Lets all be sent that is missing, after all work that the current stream has been given: after a step, also
        one that failed."""
        self._send_until(self._layers)
        self._under_way += [(moves, link.done) for link, moves, _ in self._step]
        self._step = []

    def _send_until(self, layer: int) -> None:
        if self._step and self._next < layer:
            stored = self._carrier.end()
            for link, _, pages in self._step:
                link.move(range(self._next, layer), pages, stored)
        self._next = max(self._next, layer)


class PageReceiver(_Transfers):
    """Fills pages of ``cache`` with what the :class:`PageSender` of other ranks send; see there for the order of calls.
    No step may use the pages until :meth:`poll` returns them."""

    _sends = False

    def post(self, receives: Iterable[RankPages]) -> None:
        """Receives what one ``PageSender.begin`` of each of these ranks sends, after all work that the current stream
        has been given."""
        given = self._carrier.end()
        for link, moves, pages in self._by_link(receives):
            link.move(range(self._layers), pages, given)
            self._under_way.append((moves, link.done))


def _message_pages(page_bytes: int) -> int:
    return max(1, _MESSAGE_BYTES // page_bytes)
