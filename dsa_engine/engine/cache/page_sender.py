"""Pages that leave for other ranks of the run, layer by layer, under the layers that are computed after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.cache.lane import Job
from dsa_engine.engine.cache.link import PageLink, RankPages, by_rank, rounds
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.model.kv_cache import KVCache, pool_page_bytes
from dsa_engine.parallel.group import Group


@dataclass
class _Batch:
    """What one step sends over one link."""

    link: PageLink
    moves: list[RankPages]
    rounds: list[list[int]]
    layers: deque[tuple[Job, int]] = field(default_factory=deque)  # each with its bytes


class PageSender:
    """Sends pages of ``cache``. In a step: :meth:`begin`, the forward pass, whose layers call :meth:`arrive` when they
    have stored their rows, and :meth:`finish`. Nothing of this waits for another rank.

    Without a step, ``begin`` and ``finish`` send all layers at once. Pages must stay as they are until :meth:`poll`
    returns them. Each ``begin`` corresponds to one ``PageReceiver.post`` on every rank that it names, with the same
    numbers of pages in the same order, and two ranks make all of these calls in the same order.

    Args:
        links: groups of two ranks, this one and another, by the other's number in the run.
        layers: number of layers that call ``arrive``; those of MTP modules, which run several times in a step, are sent
            by ``finish``.

    Attributes:
        bytes_sent: bytes of all transfers that have ended.
    """

    def __init__(self, cache: KVCache, links: Mapping[int, Group], layers: int):
        self._pools = cache.page_words()
        self._links = {rank: PageLink(self._pools, group) for rank, group in links.items()}
        self._layers = layers
        self._batches: list[_Batch] = []  # sent by the step that runs now
        self._next = 0  # the layer that is sent next
        self._sending: deque[_Batch] = deque()
        self._ended: list[RankPages] = []
        self.bytes_sent = 0
        cache.after_store.append(self.arrive)

    @staticmethod
    def device_bytes(config: ModelConfig, format: CacheFormat, page_size: int, links: int) -> int:
        """Device memory of the buffers, here and in a :class:`.PageReceiver`; ``config`` with its MTP modules."""
        return links * PageLink.device_bytes(max(map(sum, pool_page_bytes(config, format, page_size))))

    def begin(self, sends: Iterable[RankPages]) -> None:
        """Begins a step that sends pages: those that it fills, or others.

        Raises:
            KeyError: there is no link to a rank.
            RuntimeError: the step before has not been finished.
        """
        if self._batches:
            raise RuntimeError("the step before has not been finished")
        sends = list(sends)
        self._ended += [send for send in sends if not send.pages]
        for rank, moves in by_rank(sends).items():
            self._batches.append(_Batch(self._links[rank], moves, list(rounds(moves))))
            self._links[rank].load(self._batches[-1].rounds[0])
        self._next = 0

    def arrive(self, layer: int) -> None:
        """Starts to send a layer, whose rows the current stream has been given to store, and all layers before it."""
        if layer < self._layers:
            self._send_until(layer + 1)

    def finish(self) -> None:
        """Starts to send what is missing, after all work that the current stream has been given: after a step, also one
        that failed."""
        self._send_until(len(self._pools))
        for batch in self._batches:
            for pages in batch.rounds[1:]:
                batch.link.load(pages)
                for layer in range(len(self._pools)):
                    self._send(batch, layer, pages)
        self._sending += self._batches
        self._batches = []

    def poll(self) -> list[RankPages]:
        """Those that have been sent since the last call, without waiting.

        Raises:
            RuntimeError: a link failed.
        """
        for batch in self._sending:
            while batch.layers and batch.layers[0][0].done:
                self.bytes_sent += batch.layers.popleft()[1]
            if not batch.layers:
                self._ended += batch.moves
        self._sending = deque(batch for batch in self._sending if batch.layers)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Waits until everything has been sent."""
        for link in self._links.values():
            link.close()

    def _send_until(self, layer: int) -> None:
        for number in range(self._next, layer):
            for batch in self._batches:
                self._send(batch, number, batch.rounds[0])
        self._next = max(self._next, layer)

    def _send(self, batch: _Batch, layer: int, pages: list[int]) -> None:
        batch.layers.append((batch.link.send(layer, len(pages)), len(pages) * batch.link.layer_bytes(layer)))
