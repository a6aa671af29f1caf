"""Where the rows of a page lie, for all that moves pages.

A rank's pages below a number are *resident*: all of their rows are on its device. Those from this number on are
*spilled*: their index keys are on the device, their latent rows in host memory, which is pinned on CUDA. Reading and
writing both are copies on the current stream, in the order of its work; the host waits for none of them.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from dsa_engine.errors import CapacityError
from dsa_engine.model.pages.hot_rows import HotRows

_ADVICE = "lower host_cache_memory, which each rank takes"

Spans = list[tuple[int, int, int]]  # runs of neighbours among pairs of numbers: the first number of each, and count


def neighbours(pairs: Iterable[tuple[int, int]]) -> Spans:
    """Runs of sorted pairs in which both numbers are consecutive."""
    spans: Spans = []
    for one, other in pairs:
        first, second, count = spans[-1] if spans else (0, 0, -1)
        if (one, other) == (first + count, second + count):
            spans[-1] = first, second, count + 1
        else:
            spans.append((one, other, 1))
    return spans


class MovedPages(NamedTuple):
    """Pages in the order in which they move."""

    numbers: torch.Tensor  # int64, on the device
    spans: Spans  # where some are spilled: index of the first, its number in host memory, −1 for resident ones; count


@dataclass(frozen=True)
class PageWords:
    """A pool's pages as words to move, integers: ``on_device [pages, words]``; those after them lie ``in_host``."""

    on_device: torch.Tensor
    in_host: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Words of a page."""
        return self.on_device.shape[1]

    @property
    def page_bytes(self) -> int:
        return self.width * self.on_device.element_size()

    def of(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages ``[n, page_size, columns]`` as a pool holds them, as words ``[n, words]``."""
        return pages.flatten(1).view(self.on_device.dtype)

    def read(self, pages: MovedPages, out: torch.Tensor) -> None:
        """Copies pages to ``out [n, words]`` on the device."""
        if self.in_host is None or not pages.spans:
            torch.index_select(self.on_device, 0, pages.numbers, out=out)
            return
        for index, first, count in pages.spans:
            part = out[index : index + count]
            if first < 0:
                torch.index_select(self.on_device, 0, pages.numbers[index : index + count], out=part)
            else:
                part.copy_(self.in_host[first : first + count], non_blocking=True)

    def write(self, pages: MovedPages, rows: torch.Tensor) -> None:
        """Copies ``rows [n, words]`` on the device to pages, all of them different."""
        if self.in_host is None or not pages.spans:
            self.on_device.index_copy_(0, pages.numbers, rows)
            return
        for index, first, count in pages.spans:
            part = rows[index : index + count]
            if first < 0:
                self.on_device.index_copy_(0, pages.numbers[index : index + count], part)
            else:
                self.in_host[first : first + count].copy_(part, non_blocking=True)


class PageMap:
    """All pages of a rank, for what moves them.

    Attributes:
        layers: for every layer its pool of latent rows and, with an indexer, its pool of index keys.
        page_bytes: bytes of a page in all layers.
        spills: whether pages can be spilled.
    """

    def __init__(
        self, latent: Sequence[torch.Tensor], index_keys: Sequence[torch.Tensor | None],
        host_latent: Sequence[torch.Tensor], resident: int, hot: HotRows | None,
    ):  # fmt: skip
        """The pools of a :class:`.KVCache`, and its hot rows; ``resident``: the first number of a spilled page."""
        pools = [[pool for pool in pair if pool is not None] for pair in zip(latent, index_keys, strict=True)]
        step = math.gcd(*(pool[0].nbytes for layer in pools for pool in layer))
        word = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if step % kind.itemsize == 0)
        self.layers = [[PageWords(pool.flatten(1).view(word)) for pool in layer] for layer in pools]
        for layer, in_host in zip(self.layers, host_latent, strict=False):
            layer[0] = PageWords(layer[0].on_device[:resident], in_host.flatten(1).view(word))
        self.page_bytes = sum(pool.page_bytes for layer in self.layers for pool in layer)
        self.spills, self._resident, self._hot = bool(host_latent), resident, hot

    def moved(self, pages: Sequence[int], numbers: torch.Tensor) -> MovedPages:
        """``numbers``: those of the pages, int64 on the device."""
        spans: Spans = []
        if self.spills and max(pages, default=0) >= self._resident:
            for spilled, some in groupby(enumerate(pages), lambda one: one[1] >= self._resident):
                pairs = [(index, page - self._resident) for index, page in some]
                spans += neighbours(pairs) if spilled else [(pairs[0][0], -1, len(pairs))]
        return MovedPages(numbers, spans)

    def overwrite(self, pages: Sequence[int]) -> None:
        """Forgets the hot rows of pages that the work which the current stream is given next writes: what these rows
        are copies of changes. A decode step writes no spilled page."""
        if self._hot is not None and (spilled := [page for page in pages if page >= self._resident]):
            self._hot.forget(spilled)


def host_memory(nbytes: int, pages: int, pinned_for: object | None) -> torch.Tensor:
    """uint8 ``[nbytes]`` of host memory for ``pages`` pages. ``pinned_for``: it is pinned as long as this object
    exists; None: it is not.

    Memory of whole pages of the operating system, zeros given when they are touched: pinned as it is, without the
    rounding up of PyTorch's allocator of pinned memory.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"{nbytes:,} bytes of host memory for {pages:,} pages could not be allocated ({error}); {_ADVICE}"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if pinned_for is not None:
        runtime, address = torch.cuda.cudart(), flat.data_ptr()
        if failure := int(runtime.cudaHostRegister(address, nbytes, 0)):
            raise CapacityError(
                f"{nbytes:,} bytes of host memory for {pages:,} pages could not be pinned (CUDA error {failure}); "
                f"{_ADVICE}: pinned memory cannot be swapped, and ranks of a node share it"
            )
        # Not at the exit of the process, when the runtime may be gone.
        weakref.finalize(pinned_for, runtime.cudaHostUnregister, address).atexit = False
    return flat
