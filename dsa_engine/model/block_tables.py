"""The block tables of requests, kept on the device.

A request of 128K tokens has 2,048 pages, and nearly all of them stay the same from one decode step to the next. So each
list of pages that a step uses has a row in a table on the host and in its copy on the device, and only changes travel:
new pages of a list, and lists without a row. Then the rows of the step's requests are copied, on the device, to the
step's table. A request that ends need not be reported: a new list takes the row that has been unused the longest.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.transfer import upload

_INITIAL_SIZE = 64  # rows, and pages of a row


class BlockTables:
    """Rows of page numbers, on the host and on the device.

    Attributes:
        host: int32 ``[rows, pages]`` on the CPU; the entries after the last page of a row are arbitrary valid pages.
        uploaded: number of new page numbers that have been copied to the device so far.
    """

    def __init__(self, page_size: int, device: torch.device):
        self.page_size = page_size
        self.host = torch.zeros(_INITIAL_SIZE, _INITIAL_SIZE, dtype=torch.int32)
        self.uploaded = 0
        self._device = device
        self._on_device = upload(self.host, device)  # on a CPU the same tensor
        # For every list of pages that has a row, by its id: the row, the list itself (its id is not reused while it is
        # referenced), and the number of its pages in the row. The last used list is the last entry.
        self._known: dict[int, tuple[int, Sequence[int], int]] = {}
        self._clock = itertools.count(1)
        self._stamps: dict[int, int] = {}  # for each row, the time of its last change
        # For every tensor that was given to gather, by its id: the rows that it holds, and their stamps.
        self._gathered: dict[int, tuple[weakref.ref[torch.Tensor], list[tuple[int, int]]]] = {}

    def rows(self, requests: Sequence[Sequence[int]]) -> list[int]:
        """The row of each request's pages, up to date on the device for work that is launched from now on.

        Args:
            requests: the page numbers of each, in order of position; always the same object, which only grows.
        """
        try:
            return self._updated_rows(requests)
        except BaseException:  # an interrupt, too: the contents of the device's copy are unknown now
            self._known.clear()
            self._gathered.clear()
            raise

    def _updated_rows(self, requests: Sequence[Sequence[int]]) -> list[int]:
        # Twice as many rows as one step needs: requests that take turns keep their rows.
        self._make_room(2 * len(requests), max(map(len, requests), default=0))
        for pages in requests:  # so that none of them loses its row to another one
            if (known := self._known.pop(id(pages), None)) is not None:
                self._known[id(pages)] = known
        rows, cells, numbers = [], [], []
        for pages in requests:
            row, known_pages = self._row(pages)
            if known_pages < len(pages):
                new = torch.from_numpy(np.array(pages[known_pages:], np.int32))
                self.host[row, known_pages : len(pages)] = new
                self._stamps[row] = next(self._clock)
                cells.append(torch.arange(known_pages, len(pages)) + row * self.host.shape[1])
                numbers.append(new)
            self._known[id(pages)] = row, pages, len(pages)
            rows.append(row)
        self.uploaded += sum(map(len, numbers))
        if not self._copied_whole() and numbers and self._on_device is not self.host:
            at, new = upload(torch.stack((torch.cat(cells), torch.cat(numbers).long())), self._device)
            self._on_device.view(-1).index_copy_(0, at, new.int())
        return rows

    def gather(self, rows: Sequence[int], width: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tables of a step on the device: int32 ``[len(rows), width]``, in the order of ``rows``.

        Args:
            out: the tensor to write, which nothing else may write; nothing is done if it already holds these rows.
        """
        self._make_room(0, width)
        self._copied_whole()
        held = [(row, self._stamps.get(row, 0)) for row in rows]
        if out is not None:
            written, contents = self._gathered.get(id(out), (None, None))
            if written is not None and written() is out and contents == held:
                return out
            self._gathered.pop(id(out), None)
        numbers = upload(torch.tensor(rows, dtype=torch.int64), self._device)
        tables = torch.index_select(self._on_device[:, :width], 0, numbers, out=out)
        if out is not None:
            self._gathered[id(out)] = weakref.ref(out), held
        return tables

    def _row(self, pages: Sequence[int]) -> tuple[int, int]:
        """The row of a list, and the number of its pages in it. If no row is free, a new list takes the one that has
        been unused the longest."""
        if id(pages) in self._known:
            row, _, known = self._known[id(pages)]
            return row, known
        if len(self._known) < self.host.shape[0]:
            return len(self._known), 0
        return self._known.pop(next(iter(self._known)))[0], 0

    def _copied_whole(self) -> bool:
        """Copies the host's table to the device if it has grown; returns whether it has."""
        grown = self._on_device.shape != self.host.shape
        if grown:
            self._on_device = upload(self.host, self._device)
        return grown

    def _make_room(self, rows: int, pages: int) -> None:
        """Grows the host's table to at least this many rows and pages."""
        old = self.host
        if rows <= old.shape[0] and pages <= old.shape[1]:
            return
        sizes = [next_power_of_2(max(both)) for both in zip((rows, pages), old.shape, strict=True)]
        self.host = torch.zeros(*sizes, dtype=old.dtype)
        self.host[: old.shape[0], : old.shape[1]] = old
