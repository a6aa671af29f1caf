"""Copies of pages between the pools and host memory, layer by layer, on a stream of their own.

On CUDA a copy engine moves neighbouring slots at once, to and from a staging buffer on the device; a kernel brings them
from and to their pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.cache.copy_stream import CopyStream, Mark
from dsa_engine.model.cache.host_pages import HostPages
from dsa_engine.model.cache.page_moves import PageCopy, independent_runs

_STAGING_BYTES = 32 << 20
_INDICES = 1 << 16  # copies whose page numbers are on the device at a time


def staged_pages(largest: int) -> int:
    """Pages that pass through the staging buffer at once, by the bytes of the largest of a layer's pools."""
    return max(1, min(_STAGING_BYTES // largest, _INDICES))


def staging_bytes(largest: int) -> int:
    """Device memory of the staging buffer and of page numbers, by the bytes of the largest page of a layer's pools."""
    return staged_pages(largest) * largest + _INDICES * torch.int64.itemsize


class _Piece(NamedTuple):
    """Copies of one direction that pass through the staging buffer together."""

    to_host: bool
    pages: list[int]
    spans: list[tuple[int, int, int]]  # first of the pages, first slot, count: neighbouring slots


class HostCopies:
    """Copies run in order on one stream: after all work that the current stream was given before :meth:`start`, and,
    layer by layer, before the work that it is given after :meth:`join`.

    Attributes:
        bytes_to_host, bytes_from_host: bytes of all copies so far.
    """

    def __init__(self, pools: list[list[torch.Tensor]], host: HostPages):
        first = pools[0][0]
        largest = max(pool[0].nbytes for layer in pools for pool in layer)
        self._pools, self._host = pools, host
        self._stream = CopyStream(first.device)
        self._marks: list[Mark | None] = [None] * len(pools)  # None: the main stream waits for nothing
        self._staged = staged_pages(largest)
        self._staging = self._indices = None
        if first.is_cuda:
            self._staging = first.new_empty(self._staged * largest // first.element_size())
            self._indices = first.new_empty(_INDICES, dtype=torch.int64)
        self.bytes_to_host = self.bytes_from_host = 0

    def start(self, copies: Sequence[PageCopy]) -> Mark:
        """Starts copies, with the effect of one after another; returns their end."""
        self._stream.follow_current()
        with self._stream.active():
            pieces: list[_Piece] = []
            for piece in self._pieces(copies):
                if sum(len(one.pages) for one in pieces) + len(piece.pages) > _INDICES:
                    self._run(pieces)
                    pieces = []
                pieces.append(piece)
            self._run(pieces)
        return self._stream.mark()

    def join(self, layer: int) -> None:
        """Makes the current stream wait for the copies of a layer."""
        mark = self._marks[layer]
        if mark is not None:
            mark.join()

    def join_for_good(self, layer: int) -> None:
        """The same for the main stream, which need not wait for them again."""
        self.join(layer)
        self._marks[layer] = None

    def _pieces(self, copies: Sequence[PageCopy]) -> Iterator[_Piece]:
        for run in independent_runs(copies):
            for first in range(0, len(run.pairs), self._staged):
                pairs = run.pairs[first : first + self._staged]
                yield _Piece(run.to_host, [page for _, page in pairs], neighbours([slot for slot, _ in pairs]))

    def _run(self, pieces: list[_Piece]) -> None:
        """Copies all layers' parts of at most ``_INDICES`` pages."""
        numbers = torch.tensor([page for piece in pieces for page in piece.pages], dtype=torch.int64)
        if self._indices is not None:
            numbers = upload(numbers, self._indices.device, self._indices[: len(numbers)])
        pages = numbers.split([len(piece.pages) for piece in pieces])
        for piece in pieces:
            moved = len(piece.pages) * self._host.page_bytes
            self.bytes_to_host += moved if piece.to_host else 0
            self.bytes_from_host += 0 if piece.to_host else moved
        for layer, (pools, hosts) in enumerate(zip(self._pools, self._host.pools, strict=True)):
            for pool, host in zip(pools, hosts, strict=True):
                for piece, its_pages in zip(pieces, pages, strict=True):
                    self._copy(piece, its_pages, pool, host)
            self._marks[layer] = self._stream.mark()

    def _copy(self, piece: _Piece, pages: torch.Tensor, pool: torch.Tensor, host: torch.Tensor) -> None:
        if self._staging is None:
            for first, slot, count in piece.spans:
                some, slots = pages[first : first + count], host[slot : slot + count]
                if piece.to_host:
                    torch.index_select(pool, 0, some, out=slots)
                else:
                    pool.index_copy_(0, some, slots)
            return
        width = pool.shape[1]
        staged = self._staging[: len(pages) * width].view(-1, width)
        if piece.to_host:
            torch.index_select(pool, 0, pages, out=staged)
        for first, slot, count in piece.spans:
            some, slots = staged[first : first + count], host[slot : slot + count]
            into, source = (slots, some) if piece.to_host else (some, slots)
            into.copy_(source, non_blocking=True)
        if not piece.to_host:
            pool.index_copy_(0, pages, staged)


def neighbours(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers in sorted ``slots``, as (index of the first, first number, count)."""
    spans: list[tuple[int, int, int]] = []
    for index, slot in enumerate(slots):
        if spans and slot == spans[-1][1] + spans[-1][2]:
            first, start, count = spans[-1]
            spans[-1] = first, start, count + 1
        else:
            spans.append((index, slot, 1))
    return spans
