"""The block tables of requests, kept on the device: a step copies what it needs of them there.

A request of 128K tokens has 2,048 pages, and from one decode step to the next nearly all of them stay. So each list of
pages that steps have named has a row in a table, which the device holds too, and only what is new travels: pages
behind those that are known, and the lists that had no row. Then the rows of a step's requests are copied, on the
device, to the step's own table. Nothing has to be said when a request ends: the rows that were not asked for longest
are given to others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.transfer import upload

_FEWEST = 64  # rows, and pages of a row, at first


class BlockTables:
    """Rows of page numbers, on the host and on the device.

    Args:
        page_size: tokens of a page.
        device: that the tables are kept on.

    Attributes:
        host: int32 ``[rows, most pages]`` on the CPU; what lies behind the last page of a row means nothing, but is a
            page.
        uploaded: new page numbers that have been copied to the device so far.
    """

    def __init__(self, page_size: int, device: torch.device):
        self.page_size = page_size
        self.host = torch.zeros(_FEWEST, _FEWEST, dtype=torch.int32)
        self.uploaded = 0
        self._device = device
        self._on_device = upload(self.host, device)  # on a CPU the same tensor
        # Of every list of pages that has a row, by its id: the row, the list, so that nobody else gets its id, and how
        # many of its pages are known. What was asked for last stands last.
        self._known: dict[int, tuple[int, list[int], int]] = {}
        self._clock = itertools.count(1)
        self._stamps: dict[int, int] = {}  # of each row, when it was last written to
        # Of every tensor that was given to gather, by its id: what it holds.
        self._gathered: dict[int, tuple[weakref.ref[torch.Tensor], list[tuple[int, int]]]] = {}

    def rows(self, requests: Sequence[list[int]]) -> list[int]:
        """The row of each request's pages, up to date on the device for work that is launched from now on.

        Args:
            requests: the page numbers of each, in order of position; the same list every time, which only grows.
        """
        try:
            return self._updated_rows(requests)
        except BaseException:  # an interrupt, too: what the device holds is not known any more
            self._known.clear()
            self._gathered.clear()
            raise

    def _updated_rows(self, requests: Sequence[list[int]]) -> list[int]:
        # Twice as many as one step needs: requests that take turns keep their rows.
        self._make_room(2 * len(requests), max(map(len, requests), default=0))
        for pages in requests:  # none of them gives way to another one
            if (known := self._known.pop(id(pages), None)) is not None:
                self._known[id(pages)] = known
        rows, cells, numbers = [], [], []
        for pages in requests:
            row, known_pages = self._row(pages)
            if known_pages < len(pages):
                new = torch.tensor(pages[known_pages:], dtype=torch.int32)
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

        ``out``: where to write them; nothing else may write there, and where it holds them already nothing is done.
        """
        self._make_room(0, width)
        self._copied_whole()
        held = [(row, self._stamps.get(row, 0)) for row in rows]
        if out is not None:
            who, what = self._gathered.get(id(out), (None, None))
            if who is not None and who() is out and what == held:
                return out
            self._gathered.pop(id(out), None)
        numbers = upload(torch.tensor(rows, dtype=torch.int64), self._device)
        tables = torch.index_select(self._on_device[:, :width], 0, numbers, out=out)
        if out is not None:
            self._gathered[id(out)] = weakref.ref(out), held
        return tables

    def _row(self, pages: list[int]) -> tuple[int, int]:
        """The row of a list, and how many of its pages that holds. Once all rows are taken, a new list gets the row of
        the one that was not asked for longest."""
        if id(pages) in self._known:
            row, _, known = self._known[id(pages)]
            return row, known
        if len(self._known) < self.host.shape[0]:
            return len(self._known), 0
        return self._known.pop(next(iter(self._known)))[0], 0

    def _copied_whole(self) -> bool:
        """Whether the host's table has grown, and so was copied to the device as a whole."""
        grown = self._on_device.shape != self.host.shape
        if grown:
            self._on_device = upload(self.host, self._device)
        return grown

    def _make_room(self, rows: int, pages: int) -> None:
        """Room for at least so many in the host's table."""
        old = self.host
        if rows <= old.shape[0] and pages <= old.shape[1]:
            return
        sizes = [next_power_of_2(max(both)) for both in zip((rows, pages), old.shape, strict=True)]
        self.host = torch.zeros(*sizes, dtype=old.dtype)
        self.host[: old.shape[0], : old.shape[1]] = old
