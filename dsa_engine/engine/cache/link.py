"""Pages between this rank and one other, as one of them sends and the other receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from dsa_engine.engine.cache.lane import Job, Lane
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.parallel.group import Group

# Both ranks of a link cut pages into messages by these, whatever the number of their links.
_MESSAGE_BYTES = 4 << 20
_ROUND = 1 << 14  # pages whose numbers are on the device at a time


class RankPages(NamedTuple):
    """Pages that go to a rank, or come from it."""

    id: int  # the caller's
    rank: int  # number of the other rank in the run
    pages: list[int]  # numbers in this rank's pools


class PageLink:
    """Moves pages over a group of two ranks, in the order of the calls, without waiting.

    A message is at most 4 MiB of a layer, or one page: packed into a buffer, sent, received into a buffer, and stored
    in its pages. Work of a link has an order of its own (:class:`.Lane`), so that a rank that is late delays neither
    this rank's steps nor its other links.

    Args:
        pools: see ``KVCache.page_words``.
    """

    def __init__(self, pools: list[list[torch.Tensor]], group: Group):
        first = pools[0][0]
        self._pools, self._group = pools, group
        self._lane = Lane(first.device, "pages")
        largest = max(sum(pool.shape[1] for pool in layer) for layer in pools)
        self._buffer = first.new_empty(_message_pages(largest * first.element_size()) * largest)
        self._numbers = first.new_empty(_ROUND, dtype=torch.int64)

    @staticmethod
    def device_bytes(largest: int) -> int:
        """Device memory of the buffers, by the bytes of the largest page of a layer (latent rows and index keys)."""
        return _message_pages(largest) * largest + _ROUND * torch.int64.itemsize

    def load(self, pages: Sequence[int]) -> int:
        """Sets the pages that later calls move, at most as many as a round has; returns their number."""
        numbers, into = torch.tensor(pages, dtype=torch.int64), self._numbers[: len(pages)]
        self._lane.run(lambda: upload(numbers, into.device, into))
        return len(pages)

    def send(self, layer: int, count: int) -> Job:
        """Sends the first ``count`` of the pages in a layer, as they are after the work before."""

        def send(rows: torch.Tensor, parts: list[torch.Tensor], numbers: torch.Tensor) -> None:
            for pool, part in zip(self._pools[layer], parts, strict=True):
                torch.index_select(pool, 0, numbers, out=part)
            self._group.send(rows, 1 - self._group.index)

        return self._lane.run(lambda: self._in_messages(layer, count, send))

    def receive(self, layer: int, count: int) -> Job:
        """Fills the first ``count`` of the pages in a layer with those that the other rank sends."""

        def receive(rows: torch.Tensor, parts: list[torch.Tensor], numbers: torch.Tensor) -> None:
            self._group.recv(rows, 1 - self._group.index)
            for pool, part in zip(self._pools[layer], parts, strict=True):
                pool.index_copy_(0, numbers, part)

        return self._lane.run(lambda: self._in_messages(layer, count, receive))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a page in a layer."""
        return sum(pool[0].nbytes for pool in self._pools[layer])

    def close(self) -> None:
        """Waits for all work; on a CPU ends the thread."""
        self._lane.close()

    def _in_messages(
        self, layer: int, count: int, move: Callable[[torch.Tensor, list[torch.Tensor], torch.Tensor], None]
    ) -> None:
        """Calls ``move(rows [n, words], its columns for each pool, page numbers [n])`` for each message."""
        widths = [pool.shape[1] for pool in self._pools[layer]]
        step = _message_pages(self.layer_bytes(layer))
        for first in range(0, count, step):
            numbers = self._numbers[first : min(first + step, count)]
            rows = self._buffer[: len(numbers) * sum(widths)].view(len(numbers), -1)
            move(rows, list(rows.split(widths, dim=1)), numbers)


def _message_pages(page_bytes: int) -> int:
    return max(1, _MESSAGE_BYTES // page_bytes)


def dealt(pages: Sequence[int], index: int, size: int) -> list[int]:
    """What one of ``size`` ranks that all have a request's pages sends: every ``size``-th page, from its index on. The
    rank that receives deals the pages to fill in the same way."""
    return list(pages[index::size])


def by_rank(moves: Iterable[RankPages]) -> dict[int, list[RankPages]]:
    """Moves with pages, by the other rank."""
    ranks: dict[int, list[RankPages]] = {}
    for move in moves:
        if move.pages:
            ranks.setdefault(move.rank, []).append(move)
    return ranks


def rounds(moves: Iterable[RankPages]) -> Iterator[list[int]]:
    """The pages of all moves over one link, at most as many at a time as :meth:`PageLink.load` takes."""
    pages = [page for move in moves for page in move.pages]
    for first in range(0, len(pages), _ROUND):
        yield pages[first : first + _ROUND]
