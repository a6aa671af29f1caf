"""Hot rows: requests whose pages are spilled, all but their index keys, decode from the rows that they select.

A rank's pages have local numbers: ``[0, pages)`` are resident, ``[pages, pages + spilled)`` are spilled. Index keys of
all pages lie on the device. So a row of a decode step selects among all tokens of its request, by slots of all pages;
what it selects of spilled pages is then found in hot rows, which follow the resident pages of the latent pool, or
brought there (``kernels/rows/resolve_rows.py``, ``fetch_rows.py``). Attention reads the latent pool alone. Layers that
share a selection share where its rows lie: each brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.kernels.rows.fetch_rows import fetch_rows
from dsa_engine.kernels.rows.resolve_rows import COLUMNS, Resolved, resolve_rows
from dsa_engine.kernels.runtime.transfer import to_host, upload


class HotCounts(NamedTuple):
    """Of all decode steps so far, on this rank."""

    selected: int = 0  # rows of spilled pages, by the layers that select
    missed: int = 0  # those of them that were not in hot rows
    fetched_bytes: int = 0  # from host memory, in all layers


class HotRows:
    """Where the rows of spilled pages lie on the device, of a rank's caches. Everything has a fixed address.

    Attributes:
        of_set: int64 ``[selecting layers, sets + 1, 4]`` on the device, as :func:`.resolve_rows` counts.
    """

    def __init__(
        self,
        indexer_types: Sequence[str],
        pages: int,
        latent: list[torch.Tensor],
        host_latent: list[torch.Tensor],
        sets: int,
        hot_rows: int,
    ):
        """``latent``, ``host_latent``: pools of every layer, ``[pages and pages of hot rows, page_size, columns]`` and
        ``[spilled pages, page_size, columns]``; ``pages``: the resident ones; ``sets``: of ``hot_rows`` rows each."""
        self._pages, self.latent, self.host_latent, self._sets = pages, latent, host_latent, sets
        (spilled, page_size, _), device = host_latent[0].shape, latent[0].device
        self.limit = pages * page_size
        selecting = torch.tensor([kind == "full" for kind in indexer_types])
        self._tables_of = (selecting.cumsum(0) - 1).tolist()  # by layer
        layers = int(selecting.sum())
        self._where = torch.full((layers, spilled + 1, page_size), -1, dtype=torch.int32, device=device)
        self._row_of = torch.full((layers, sets + 1, hot_rows), -1, dtype=torch.int32, device=device)
        self._stamp = torch.zeros_like(self._row_of)
        self.of_set = torch.zeros(layers, sets + 1, COLUMNS, dtype=torch.int64, device=device)
        row_bytes = latent[0].shape[-1] * latent[0].element_size()
        self._fetched = torch.tensor(self._tables_of).bincount(minlength=layers) * row_bytes  # for a miss, by tables
        self._counts, self._asked = HotCounts(), False
        self._read: Callable[[], torch.Tensor] | None = None
        # By number of requests: their sets, on the host and on the device.
        self._loaded: dict[int, tuple[list[int], torch.Tensor]] = {}

    @property
    def device_bytes(self) -> int:
        """Bytes of the tables on the device, beside the hot rows themselves."""
        return sum(x.nbytes for x in (self._where, self._row_of, self._stamp, self.of_set))

    def forget(self, pages: Sequence[int]) -> None:
        """Local numbers of spilled pages, whose rows have been written: no hot row is a copy of theirs any more."""
        numbers = upload(torch.tensor(pages) - self._pages, self._where.device)
        self._where.index_fill_(1, numbers, -1)

    def load(self, sets: Sequence[Sequence[int]], requests: int) -> None:
        """Sets the sets of a step's requests, by rank that holds pages together, of ``requests`` each with padding."""
        if self._asked:
            self._asked, self._read = False, to_host(self.of_set)
        numbers = [number for of_rank in sets for number in (*of_rank, *[self._sets] * (requests - len(of_rank)))]
        known, there = self._loaded.get(len(numbers), ([], self._where.new_empty(len(numbers))))
        if known != numbers:
            upload(torch.tensor(numbers, dtype=torch.int32), there.device, out=there)
            self._loaded[len(numbers)] = numbers, there

    def counts(self) -> HotCounts:
        """As of the decode step after the call before. Any thread may call it, and only that one waits."""
        if (read := self._read) is not None:
            selected, missed = read()[:, :-1, 2:].sum(dim=1).unbind(1)
            self._counts = HotCounts(int(selected.sum()), int(missed.sum()), int((missed * self._fetched).sum()))
        self._asked = True
        return self._counts

    def step(self, ranks: int, requests: int, first: int, last: int) -> HotStep:
        """For the requests ``first … last-1`` of each rank, which :meth:`load` has been given."""
        return HotStep(self, self._loaded[ranks * requests][1].view(ranks, requests)[:, first:last].flatten())

    def resolve(self, layer: int, slots: torch.Tensor, sets: torch.Tensor) -> Resolved:
        """:func:`.resolve_rows` with the tables of a layer, or of the one whose selection it shares."""
        of = self._tables_of[layer]
        return resolve_rows(
            slots, sets, self._where[of], self._row_of[of], self._stamp[of], self.of_set[of], self.limit
        )


@dataclass
class HotStep:
    """A pass of a decode step, or of a micro-batch."""

    hot: HotRows
    sets: torch.Tensor  # [requests] int32
    _last: tuple[torch.Tensor, Resolved] | None = None  # a selection, and where its rows are

    def find(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The slots of the layer's pool that hold the selected rows, which are brought if they are missing; a selection
        that the layer before has used too is not resolved again."""
        if self._last is None or self._last[0] is not slots:
            self._last = slots, self.hot.resolve(layer, slots, self.sets)
        resolved, *missed = self._last[1]
        fetch_rows(self.hot.latent[layer], self.hot.host_latent[layer], *missed)
        return resolved
