"""Pages from the ranks that prefill to those that decode, under the steps of both.

Each pair of ranks is a link, with its own group, buffer and order of work, so that a rank that is late delays neither
the steps of the other nor its other links.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.cache.transfer import pack, unpack
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.kv_cache import KVCache, pool_page_bytes
from dsa_engine.parallel.group import Group

# Both ranks of a link cut pages into messages by these, whatever the number of their links.
_MESSAGE_BYTES = 4 << 20
_ROUND = 1 << 14  # pages whose numbers are on the device at a time

Done = Callable[[], bool]  # whether work has ended; raises its error


class RankPages(NamedTuple):
    """Pages that go to a rank, or come from it."""

    id: int  # the caller's
    rank: int  # number of the other rank in the run
    pages: list[int]  # numbers in this rank's pools


def dealt(pages: Sequence[int], index: int, size: int) -> list[int]:
    """What one of ``size`` ranks that all have a request's pages sends: every ``size``-th page, from its index on. The
    rank that receives deals the pages to fill in the same way."""
    return list(pages[index::size])


class PageLink:
    """Sends or receives pages over a group of two ranks, in the order of the calls; the caller never waits.

    A message is at most 4 MiB of a layer, or one page: packed into a buffer, sent, received into a buffer, and stored
    in its pages. On CUDA all this is launched at once, on a stream of its own, after what the current stream has been
    given so far. On a CPU a thread runs it, which may block; after an error it runs nothing more.

    Args:
        pools: see ``KVCache.page_words``.

    Attributes:
        done: whether the work of the calls so far has ended; later calls replace it.
    """

    def __init__(self, pools: list[list[torch.Tensor]], group: Group, sends: bool):
        first = pools[0][0]
        largest = max(sum(pool.shape[1] for pool in layer) for layer in pools)
        self._pools, self._group, self._sends = pools, group, sends
        self._buffer = first.new_empty(_message_pages(largest * first.element_size()) * largest)
        self._numbers = first.new_empty(_ROUND, dtype=torch.int64)
        self._stream = torch.cuda.Stream(first.device) if first.is_cuda else None
        self._work: SimpleQueue[tuple[Callable[[], object], Future[bool]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.done: Done = lambda: True

    def load(self, pages: Sequence[int]) -> None:
        """Sets the pages that later calls move, at most as many as a round has."""
        numbers, into = torch.tensor(pages, dtype=torch.int64), self._numbers[: len(pages)]
        self._run(lambda: upload(numbers, into.device, into))

    def move(self, layer: int, count: int) -> None:
        """Sends the first ``count`` of the pages in a layer, as they are after the work before, or fills them."""
        self._run(lambda: self._move(layer, count))

    def close(self) -> None:
        """Waits for all work; on a CPU ends the thread."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _move(self, layer: int, count: int) -> None:
        pools, other = self._pools[layer], 1 - self._group.index
        step, width = _message_pages(sum(pool[0].nbytes for pool in pools)), sum(pool.shape[1] for pool in pools)
        for first in range(0, count, step):
            numbers = self._numbers[first : min(first + step, count)]
            rows = self._buffer[: len(numbers) * width].view(len(numbers), width)
            if self._sends:
                pack(pools, numbers, rows)
                self._group.send(rows, other)
            else:
                self._group.recv(rows, other)
                unpack(pools, numbers, rows)

    def _run(self, work: Callable[[], object]) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), torch.inference_mode():
                work()
                end = torch.cuda.Event()
                end.record(self._stream)
            self.done = end.query
            return
        if self._thread is None:  # it may wait for ever for another rank, so it does not keep the process alive
            self._thread = threading.Thread(target=self._work_off, name="dsa_engine pages", daemon=True)
            self._thread.start()
        ended: Future[bool] = Future()
        self._work.put((work, ended))
        self.done = lambda: ended.done() and ended.result()

    @torch.inference_mode()
    def _work_off(self) -> None:
        error: BaseException | None = None
        while (job := self._work.get()) is not None:
            work, ended = job
            try:
                if error is None:
                    work()
            except BaseException as raised:
                error = raised
            if error is None:
                ended.set_result(True)
            else:
                ended.set_exception(error)


class _Transfers:
    """Pages on their way over the links of this rank.

    Args:
        links: groups of two ranks, this one and another, by the other's number in the run.

    Attributes:
        bytes_moved: bytes of all transfers that have ended.
    """

    _sends: bool

    def __init__(self, cache: KVCache, links: Mapping[int, Group]):
        self._page_bytes, self._layers = cache.page_bytes, len(cache.latent)
        self._links = {rank: PageLink(cache.page_words(), group, self._sends) for rank, group in links.items()}
        self._under_way: list[tuple[list[RankPages], Done]] = []
        self.bytes_moved = 0

    def poll(self) -> list[RankPages]:
        """Those that have ended since the last call, without waiting.

        Raises:
            RuntimeError: a link failed.
        """
        done = [is_done() for _, is_done in self._under_way]
        ended = [move for (moves, _), its in zip(self._under_way, done, strict=True) if its for move in moves]
        self._under_way = [one for one, its in zip(self._under_way, done, strict=True) if not its]
        self.bytes_moved += self._page_bytes * sum(len(move.pages) for move in ended)
        return ended

    def close(self) -> None:
        """Waits until all transfers have ended."""
        for link in self._links.values():
            link.close()

    def _by_link(self, moves: Iterable[RankPages]) -> Iterator[tuple[PageLink, list[RankPages], list[list[int]]]]:
        """For each link its moves, and their pages in rounds, as :meth:`PageLink.load` takes them. Moves without pages
        have ended."""
        of_rank: dict[int, list[RankPages]] = {}
        for move in moves:
            if move.pages:
                of_rank.setdefault(move.rank, []).append(move)
            else:
                self._under_way.append(([move], lambda: True))
        for rank, its in of_rank.items():
            pages = [page for move in its for page in move.pages]
            yield self._links[rank], its, [pages[first : first + _ROUND] for first in range(0, len(pages), _ROUND)]

    def _move(self, link: PageLink, moves: list[RankPages], rounds: list[list[int]]) -> None:
        """Starts to move these rounds in all layers, with which the moves end."""
        for pages in rounds:
            link.load(pages)
            for layer in range(self._layers):
                link.move(layer, len(pages))
        self._under_way.append((moves, link.done))


class PageSender(_Transfers):
    """Sends pages of ``cache``. In a step: :meth:`begin`, the forward pass, whose layers call :meth:`arrive` when they
    have stored their rows, and :meth:`finish`. Nothing of this waits for another rank.

    Without a step, ``begin`` and ``finish`` send all layers at once. Pages must stay as they are until :meth:`poll`
    returns them. Each ``begin`` corresponds to one ``PageReceiver.post`` on every rank that it names, with the same
    numbers of pages in the same order, and two ranks make all of these calls in the same order.

    Args:
        layers: number of layers that call ``arrive``; those of MTP modules, which run several times in a step, are sent
            by ``finish``.
    """

    _sends = True

    def __init__(self, cache: KVCache, links: Mapping[int, Group], layers: int):
        super().__init__(cache, links)
        self._main_layers = layers
        self._step: list[tuple[PageLink, list[RankPages], list[list[int]]]] = []  # what the step sends that runs now
        self._next = 0  # the layer that is sent next
        cache.after_store.append(self.arrive)

    @staticmethod
    def device_bytes(config: ModelConfig, format: CacheFormat, page_size: int, links: int) -> int:
        """Device memory of the buffers, here and in a :class:`PageReceiver`; ``config`` with its MTP modules."""
        largest = max(map(sum, pool_page_bytes(config, format, page_size)))
        return links * (_message_pages(largest) * largest + _ROUND * torch.int64.itemsize)

    def begin(self, sends: Iterable[RankPages]) -> None:
        """Begins a step that sends pages: those that it fills, or others.

        Raises:
            KeyError: there is no link to a rank.
        """
        self._step, self._next = list(self._by_link(sends)), 0
        for link, _, rounds in self._step:
            link.load(rounds[0])

    def arrive(self, layer: int) -> None:
        """Starts to send a layer, whose rows the current stream has been given to store, and all layers before it."""
        if layer < self._main_layers:
            self._send_until(layer + 1)

    def finish(self) -> None:
        """Starts to send what is missing, after all work that the current stream has been given: after a step, also one
        that failed."""
        self._send_until(self._layers)
        for link, moves, rounds in self._step:
            self._move(link, moves, rounds[1:])
        self._step = []

    def _send_until(self, layer: int) -> None:
        for number in range(self._next, layer):
            for link, _, rounds in self._step:
                link.move(number, len(rounds[0]))
        self._next = max(self._next, layer)


class PageReceiver(_Transfers):
    """Fills pages of ``cache`` with what the :class:`PageSender` of other ranks send; see there for the order of calls
    and for the memory of the buffers. No step may use the pages until :meth:`poll` returns them."""

    _sends = False

    def post(self, receives: Iterable[RankPages]) -> None:
        """Starts to receive what one ``PageSender.begin`` of each of these ranks sends, after all work that the current
        stream has been given.

        On CUDA a receive that waits for its message takes part of the device: post it when the sender begins.

        Raises:
            KeyError: there is no link to a rank.
        """
        for link, moves, rounds in self._by_link(receives):
            self._move(link, moves, rounds)


def _message_pages(page_bytes: int) -> int:
    return max(1, _MESSAGE_BYTES // page_bytes)
