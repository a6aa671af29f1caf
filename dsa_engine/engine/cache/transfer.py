"""A rank's pages between device and host memory and between ranks, beside the steps that use them, layer by layer.

On CUDA copies run on a stream of their own: a copy engine moves neighbouring slots at once, to and from a staging
buffer on the device, and a kernel brings them from and to their pages. On a CPU the same is done at once. A page that
spills goes through the same buffer: its latent rows to host memory, its index keys to those of another page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch

from dsa_engine.engine.cache.exchange import PageExchange
from dsa_engine.engine.cache.pool import PageCopy, PageMoves
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.pages.page_map import MovedPages, PageMap, PageWords, Spans, host_memory, neighbours
from dsa_engine.parallel.group import Group

_STAGING_BYTES = 32 << 20
_INDICES = 1 << 16  # copies whose page numbers are on the device at a time


class HostPages:
    """Room for ``slots`` pages of all layers of ``cache``, in pinned memory if its device is CUDA. ``pools``: for every
    layer its latent rows and, with an indexer, its index keys: ``[slots, words of a page]``, integers as in
    :class:`.PageMap`."""

    def __init__(self, cache: KVCache, slots: int):
        words = cache.page_map.layers
        self.slots = slots
        self.page_bytes = cache.page_bytes
        self.bytes = slots * self.page_bytes
        flat = host_memory(self.bytes, slots, self if cache.latent[0].is_cuda else None)
        parts = iter(flat.view(words[0][0].on_device.dtype).split([slots * pool.width for pool in chain(*words)]))
        self.pools = [[next(parts).view(slots, -1) for _ in layer] for layer in words]
        self._bytes = [pool.view(torch.uint8).numpy() for pool in chain(*self.pools)]

    def parts(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, writable: layer 0's latent rows, its index keys if it has them, layer 1's, …"""
        return [pool[slot].data for pool in self._bytes]


def staging_bytes(largest: int) -> int:
    """Device memory of the staging buffer and of page numbers, by the bytes of the largest page of a layer's pools."""
    return _staged_pages(largest) * largest + _INDICES * torch.int64.itemsize


def _staged_pages(largest: int) -> int:
    return max(1, min(_STAGING_BYTES // largest, _INDICES))


class CopyRun(NamedTuple):
    """Copies of one direction that do not depend on each other, as (slot, page), sorted."""

    to_host: bool
    pairs: list[tuple[int, int]]


def independent_runs(copies: Iterable[PageCopy]) -> list[CopyRun]:
    """Orders copies into as few runs as dependencies between pages and slots allow: run after run they have the effect
    of the copies one after another. Runs to the host and back alternate: pages that leave and others that take their
    places are two runs."""
    runs: list[CopyRun] = []
    # The last run that read or wrote a page (False, page) or a slot (True, slot); -1: none.
    read: dict[tuple[bool, int], int] = {}
    written: dict[tuple[bool, int], int] = {}
    for to_host, page, slot in copies:
        source, target = ((False, page), (True, slot)) if to_host else ((True, slot), (False, page))
        number = 1 + max(written.get(source, -1), written.get(target, -1), read.get(target, -1))
        number += (number % 2 == 0) != to_host  # even runs go to the host
        while len(runs) <= number:
            runs.append(CopyRun(len(runs) % 2 == 0, []))
        runs[number].pairs.append((slot, page))
        read[source] = max(number, read.get(source, -1))
        written[target] = number
    for run in runs:
        run.pairs.sort()
    return [run for run in runs if run.pairs]


class HostCopies:
    """Copies run in order: after all work that the current stream was given before :meth:`start`, and, layer by layer,
    before the work that it is given after :meth:`join`. ``wait``: blocks until all copies so far are done; any thread
    may call it."""

    def __init__(self, page_map: PageMap, host: HostPages):
        pools = page_map.layers
        first = pools[0][0].on_device
        largest = max(pool.page_bytes for pool in chain(*pools))
        self._map, self._pools, self._host = page_map, pools, host
        self._cuda = torch.get_device_module(first.device)  # on a CPU torch.cpu, whose streams do nothing
        self._stream = self._cuda.Stream(first.device)
        self._ends: list[Any] = [None] * len(pools)  # for each layer, the event that the main stream has to wait for
        self._staged = _staged_pages(largest)
        self._staging = first.new_empty(self._staged * largest // first.element_size())
        self._indices = first.new_empty(_INDICES, dtype=torch.int64)
        self._spilled_bytes = sum(pool.page_bytes for pool in chain(*pools) if pool.in_host is not None)
        self.wait: Callable[[], None] = lambda: None
        self.bytes_to_host = self.bytes_from_host = 0

    def start(self, copies: Sequence[PageCopy]) -> None:
        to_host, spills = sum(copy.to_host for copy in copies), 0
        if self._map.spills:
            spills = sum(copy.slot < 0 for copy in copies)
            self._map.overwrite([into for copy in copies if (into := _written(copy)) is not None])
        self.bytes_to_host += (to_host - spills) * self._map.page_bytes + spills * self._spilled_bytes
        self.bytes_from_host += (len(copies) - to_host) * self._map.page_bytes
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            # Spills and other copies may name the same pages, so they stay in order.
            for spill, some in groupby(copies, lambda copy: copy.slot < 0) if spills else ((False, copies),):
                part, run = [*some], self._spill if spill else self._run
                for first in range(0, len(part), _INDICES // (1 + spill)):
                    run(part[first : first + _INDICES // (1 + spill)])
        self.wait = self._end().synchronize

    def join(self, layer: int) -> None:
        if self._ends[layer] is not None:
            self._cuda.current_stream().wait_event(self._ends[layer])

    def _run(self, copies: Sequence[PageCopy]) -> None:
        """All layers' copies, whose page numbers are on the device together."""
        pieces = [
            CopyRun(run.to_host, run.pairs[first : first + self._staged])
            for run in independent_runs(copies)
            for first in range(0, len(run.pairs), self._staged)
        ]
        pages = self._moved([[page for _, page in piece.pairs] for piece in pieces])
        spans = [neighbours((slot, index) for index, (slot, _) in enumerate(piece.pairs)) for piece in pieces]
        for layer, (pools, hosts) in enumerate(zip(self._pools, self._host.pools, strict=True)):
            for pool, host in zip(pools, hosts, strict=True):
                for piece, its_pages, its_spans in zip(pieces, pages, spans, strict=True):
                    self._copy(piece.to_host, its_pages, its_spans, pool, host)
            self._ends[layer] = self._end()

    def _spill(self, copies: Sequence[PageCopy]) -> None:
        """Resident pages to spilled ones; none of them is both. Of those that go to the same page the last counts."""
        source_of = {-1 - copy.slot: copy.page for copy in copies}
        targets = sorted(source_of)  # neighbours go to host memory at once
        pieces = [targets[first : first + self._staged] for first in range(0, len(targets), self._staged)]
        both = self._moved([*([source_of[page] for page in piece] for piece in pieces), *pieces])
        for layer, pools in enumerate(self._pools):
            for pool in pools:
                for source, target in zip(both[: len(pieces)], both[len(pieces) :], strict=True):
                    staged = self._staged_rows(source, pool)
                    pool.read(source, staged)
                    pool.write(target, staged)
            self._ends[layer] = self._end()

    def _moved(self, parts: Sequence[Sequence[int]]) -> list[MovedPages]:
        numbers = torch.tensor([*chain(*parts)])
        numbers = upload(numbers, self._indices.device, self._indices[: len(numbers)])
        split = numbers.split([*map(len, parts)])
        return [self._map.moved(part, on_device) for part, on_device in zip(parts, split, strict=True)]

    def _staged_rows(self, pages: MovedPages, pool: PageWords) -> torch.Tensor:
        return self._staging[: len(pages.numbers) * pool.width].view(-1, pool.width)

    def _copy(self, to_host: bool, pages: MovedPages, spans: Spans, pool: PageWords, host: torch.Tensor) -> None:
        """The spans are of slots and of indices in ``pages``."""
        staged = self._staged_rows(pages, pool)
        if to_host:
            pool.read(pages, staged)
        for slot, index, count in spans:
            some, slots = staged[index : index + count], host[slot : slot + count]
            into, source = (slots, some) if to_host else (some, slots)
            into.copy_(source, non_blocking=True)
        if not to_host:
            pool.write(pages, staged)

    def _end(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event


def _written(copy: PageCopy) -> int | None:
    """The page that a copy writes: a spilled one gets the rows of a resident one."""
    return -1 - copy.slot if copy.slot < 0 else None if copy.to_host else copy.page


class PageTransfer:
    """Moves pages of ``cache`` before a step's layers read them.

    In a step: :meth:`begin`, then the forward pass, whose layers call :meth:`arrive`, or a CUDA graph after
    :meth:`finish`. All of this runs on one thread. On a CPU copies are done at once; exchanges overlap there too.
    ``max_exchanged``: maximum number of pages that a rank sends, and that it receives, in a step; 0: no exchanges.
    """

    def __init__(self, cache: KVCache, group: Group, host: HostPages | None, max_exchanged: int):
        self.host, self._layers = host, len(cache.page_map.layers)
        self.copies = HostCopies(cache.page_map, host) if host else None
        self._exchange = PageExchange(cache.page_map, group, max_exchanged) if max_exchanged else None
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
