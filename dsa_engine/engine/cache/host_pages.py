"""Slots for pages in host memory."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch

from dsa_engine.errors import CapacityError
from dsa_engine.model.kv_cache import KVCache

_ADVICE = "lower host_cache_memory, which each rank takes"


class HostPages:
    """Room for ``slots`` pages of all layers of ``cache``, in pinned memory if its device is CUDA.

    Attributes:
        pools: for every layer its latent rows and, with an indexer, its index keys: ``[slots, words of a page]``,
            integers as in ``KVCache.page_words``.
        page_bytes: bytes of a page in all layers.

    Raises:
        CapacityError: the memory cannot be allocated or pinned.
    """

    def __init__(self, cache: KVCache, slots: int):
        if slots < 1:
            raise ValueError(f"host memory for {slots} pages; there must be room for at least 1")
        words = cache.page_words()
        self.slots = slots
        self.page_bytes = sum(pool[0].nbytes for layer in words for pool in layer)
        memory = self._allocate()
        flat = torch.frombuffer(memory, dtype=words[0][0].dtype)
        if cache.latent[0].is_cuda:
            self._pin(flat)
        self.pools: list[list[torch.Tensor]] = []
        self._parts: list[tuple[memoryview, int]] = []  # for every pool: its bytes, and bytes of a page
        first = 0
        for layer in words:
            self.pools.append([])
            for pool in layer:
                width, item = pool.shape[1], pool.element_size()
                last = first + slots * width
                self.pools[-1].append(flat[first:last].view(slots, width))
                self._parts.append((memoryview(memory)[first * item : last * item], width * item))
                first = last

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.page_bytes

    def parts(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, writable: layer 0's latent rows, its index keys if it has them, layer 1's, …"""
        return [pool[slot * size : (slot + 1) * size] for pool, size in self._parts]

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
