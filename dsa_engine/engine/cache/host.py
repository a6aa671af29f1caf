"""Pages in host memory, and the copies between it and the pools, layer by layer.

On CUDA copies run on a stream of their own: a copy engine moves neighbouring slots at once, to and from a staging
buffer on the device, and a kernel brings them from and to their pages. On a CPU they are copies from memory to memory.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch

from dsa_engine.engine.cache.moves import CopyRun, PageCopy, independent_runs, neighbours
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.kv_cache import KVCache

_ADVICE = "lower host_cache_memory, which each rank takes"
_STAGING_BYTES = 32 << 20
_INDICES = 1 << 16  # copies whose page numbers are on the device at a time


class HostPages:
    """Room for ``slots`` pages of all layers of ``cache``, in pinned memory if its device is CUDA.

    Attributes:
        pools: for every layer its latent rows and, with an indexer, its index keys: ``[slots, words of a page]``,
            integers as in ``KVCache.page_words``.
        page_bytes: bytes of a page in all layers.
        bytes: bytes of all slots.

    Raises:
        CapacityError: the memory cannot be allocated or pinned.
    """

    def __init__(self, cache: KVCache, slots: int):
        words = cache.page_words()
        self.slots = slots
        self.page_bytes = sum(pool[0].nbytes for pool in chain(*words))
        self.bytes = slots * self.page_bytes
        flat = torch.frombuffer(self._allocate(), dtype=words[0][0].dtype)
        if cache.latent[0].is_cuda:
            self._pin(flat)
        parts = iter(flat.split([slots * pool.shape[1] for pool in chain(*words)]))
        self.pools = [[next(parts).view(slots, -1) for _ in layer] for layer in words]
        self._bytes = [pool.view(torch.uint8).numpy() for pool in chain(*self.pools)]

    def parts(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, writable: layer 0's latent rows, its index keys if it has them, layer 1's, …"""
        return [pool[slot].data for pool in self._bytes]

    def _allocate(self) -> mmap.mmap:
        """Memory of whole pages of the operating system, given when it is touched: pinned as it is, without the
        rounding up of PyTorch's allocator of pinned memory."""
        try:
            memory = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"{self.bytes:,} bytes of host memory for {self.slots:,} pages could not be allocated ({error}); "
                f"{_ADVICE}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _pin(self, flat: torch.Tensor) -> None:
        runtime, address = torch.cuda.cudart(), flat.data_ptr()
        failure = int(runtime.cudaHostRegister(address, self.bytes, 0))
        if failure:
            raise CapacityError(
                f"{self.bytes:,} bytes of host memory for {self.slots:,} pages could not be pinned (CUDA error "
                f"{failure}); {_ADVICE}: pinned memory cannot be swapped, and ranks of a node share it"
            )
        # Not at the exit of the process, when the runtime may be gone.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


def staged_pages(largest: int) -> int:
    """Pages that pass through the staging buffer at once, by the bytes of the largest page of a layer's pools."""
    return max(1, min(_STAGING_BYTES // largest, _INDICES))


def staging_bytes(largest: int) -> int:
    """Device memory of the staging buffer and of page numbers, by the bytes of the largest page of a layer's pools."""
    return staged_pages(largest) * largest + _INDICES * torch.int64.itemsize


class _Piece(NamedTuple):
    """Copies of one direction that pass through the staging buffer together."""

    to_host: bool
    pages: list[int]
    spans: list[tuple[int, int, int]]  # neighbouring slots: first slot, index of its page, count


class HostCopies:
    """Copies run in order: after all work that the current stream was given before :meth:`start`, and, layer by layer,
    before the work that it is given after :meth:`join`.

    Args:
        pools: see ``KVCache.page_words``.
        staged: whether copies pass through a buffer on the pools' device; without, all memory is the host's.

    Attributes:
        wait: blocks until all copies so far are done; any thread may call it.
        bytes_to_host, bytes_from_host: bytes of all copies so far.
    """

    def __init__(self, pools: list[list[torch.Tensor]], host: HostPages, staged: bool):
        first = pools[0][0]
        largest = max(pool[0].nbytes for pool in chain(*pools))
        self._pools, self._host = pools, host
        self._cuda = torch.get_device_module(first.device)  # on a CPU torch.cpu, whose streams do nothing
        self._stream = self._cuda.Stream(first.device)
        self._ends: list[Any] = [None] * len(pools)  # for each layer, the event that the main stream has to wait for
        self._staging: torch.Tensor | None = None
        self._staged = staged_pages(largest)
        if staged:
            self._staging = first.new_empty(self._staged * largest // first.element_size())
            self._indices = first.new_empty(_INDICES, dtype=torch.int64)
        self.wait: Callable[[], None] = lambda: None
        self.bytes_to_host = self.bytes_from_host = 0

    def start(self, copies: Sequence[PageCopy]) -> None:
        """Starts copies, with the effect of one after another.

        Raises:
            ValueError: there is no such page or slot.
        """
        for _, page, slot in copies:  # checked, as memory is written
            if not (0 <= page < len(self._pools[0][0]) and 0 <= slot < self._host.slots):
                raise ValueError(
                    f"no copy between page {page} and slot {slot}: there are {len(self._pools[0][0])} pages and "
                    f"{self._host.slots} slots"
                )
        to_host = sum(copy.to_host for copy in copies)
        self.bytes_to_host += to_host * self._host.page_bytes
        self.bytes_from_host += (len(copies) - to_host) * self._host.page_bytes
        runs = independent_runs(copies)
        if self._staging is not None:
            self._stream.wait_stream(self._cuda.current_stream())
            with self._cuda.stream(self._stream):
                for pieces in self._rounds(runs):
                    self._run(pieces, self._staging)
            self.wait = self._end().synchronize
        else:
            for run in runs:
                self._run_in_memory(run)

    def join(self, layer: int) -> None:
        """Makes the current stream wait for the copies of a layer."""
        if self._ends[layer] is not None:
            self._cuda.current_stream().wait_event(self._ends[layer])

    def join_for_good(self, layer: int) -> None:
        """The same for the main stream, which need not wait for them again."""
        self.join(layer)
        self._ends[layer] = None

    def _run_in_memory(self, run: CopyRun) -> None:
        """Neighbouring targets are gathered at the rate of a plain copy, and others moved one by one: a scatter
        (index_copy_) takes twice the time."""
        pairs = sorted((slot, page) if run.to_host else (page, slot) for slot, page in run.pairs)  # (target, source)
        sources = torch.tensor([source for _, source in pairs])
        spans = neighbours((target, index) for index, (target, _) in enumerate(pairs))
        single = [pairs[index] for _, index, count in spans if count == 1]
        for pool, host in zip(chain(*self._pools), chain(*self._host.pools), strict=True):
            source, target = (pool, host) if run.to_host else (host, pool)
            for first, index, count in spans:
                if count > 1:
                    torch.index_select(source, 0, sources[index : index + count], out=target[first : first + count])
            size, into, start = pool[0].nbytes, target.data_ptr(), source.data_ptr()
            for to, number in single:
                ctypes.memmove(into + to * size, start + number * size, size)

    def _rounds(self, runs: list[CopyRun]) -> Iterator[list[_Piece]]:
        """Pieces whose page numbers fit on the device together."""
        pieces: list[_Piece] = []
        for run in runs:
            for first in range(0, len(run.pairs), self._staged):
                pairs = run.pairs[first : first + self._staged]
                if pieces and sum(len(piece.pages) for piece in pieces) + len(pairs) > _INDICES:
                    yield pieces
                    pieces = []
                spans = neighbours((slot, index) for index, (slot, _) in enumerate(pairs))
                pieces.append(_Piece(run.to_host, [page for _, page in pairs], spans))
        if pieces:
            yield pieces

    def _run(self, pieces: list[_Piece], staging: torch.Tensor) -> None:
        """All layers' copies of one round."""
        numbers = torch.tensor([page for piece in pieces for page in piece.pages])
        numbers = upload(numbers, self._indices.device, self._indices[: len(numbers)])
        pages = numbers.split([len(piece.pages) for piece in pieces])
        for layer, (pools, hosts) in enumerate(zip(self._pools, self._host.pools, strict=True)):
            for pool, host in zip(pools, hosts, strict=True):
                for piece, its_pages in zip(pieces, pages, strict=True):
                    staged = staging[: len(its_pages) * pool.shape[1]].view(-1, pool.shape[1])
                    _copy(piece, its_pages, pool, staged, host)
            self._ends[layer] = self._end()

    def _end(self) -> Any:
        """An event at the end of all work that the stream has been given so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event


def _copy(piece: _Piece, pages: torch.Tensor, pool: torch.Tensor, staged: torch.Tensor, host: torch.Tensor) -> None:
    """The copies of a piece in one pool, through ``staged [n, words of a page]``."""
    if piece.to_host:
        torch.index_select(pool, 0, pages, out=staged)
    for slot, first, count in piece.spans:
        some, slots = staged[first : first + count], host[slot : slot + count]
        into, source = (slots, some) if piece.to_host else (some, slots)
        into.copy_(source, non_blocking=True)
    if not piece.to_host:
        pool.index_copy_(0, pages, staged)
