"""Pages that come from other ranks of the run, while this rank runs steps on other pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dsa_engine.engine.cache.lane import Job
from dsa_engine.engine.cache.link import PageLink, RankPages, by_rank, rounds
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.parallel.group import Group


class PageReceiver:
    """Fills pages of ``cache`` with what the :class:`.PageSender` of other ranks send; see there for the order of calls
    and for the memory of the buffers. No step may use the pages until :meth:`poll` returns them.

    Args:
        links: groups of two ranks, this one and another, by the other's number in the run.

    Attributes:
        bytes_received: bytes of all transfers that have ended.
    """

    def __init__(self, cache: KVCache, links: Mapping[int, Group]):
        self._pools = cache.page_words()
        self._page_bytes = cache.page_bytes
        self._links = {rank: PageLink(self._pools, group) for rank, group in links.items()}
        self._receiving: list[tuple[list[RankPages], Job]] = []
        self._ended: list[RankPages] = []
        self.bytes_received = 0

    def post(self, receives: Iterable[RankPages]) -> None:
        """Starts to receive what one ``PageSender.begin`` of each of these ranks sends, after all work that the current
        stream has been given.

        On CUDA a receive that waits for its message takes part of the device: post it when the sender begins.

        Raises:
            KeyError: there is no link to a rank.
        """
        receives = list(receives)
        self._ended += [receive for receive in receives if not receive.pages]
        for rank, moves in by_rank(receives).items():
            link = self._links[rank]
            for pages in rounds(moves):
                count = link.load(pages)
                jobs = [link.receive(layer, count) for layer in range(len(self._pools))]
            self._receiving.append((moves, jobs[-1]))

    def poll(self) -> list[RankPages]:
        """Those whose pages have been filled since the last call, without waiting.

        Raises:
            RuntimeError: a link failed.
        """
        done = [job.done for _, job in self._receiving]
        for (moves, _), arrived in zip(self._receiving, done, strict=True):
            if arrived:
                self._ended += moves
                self.bytes_received += self._page_bytes * sum(len(move.pages) for move in moves)
        self._receiving = [one for one, arrived in zip(self._receiving, done, strict=True) if not arrived]
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Waits until everything posted has come."""
        for link in self._links.values():
            link.close()
