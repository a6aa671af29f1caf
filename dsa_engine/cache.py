"""Paged caches: pools of latent rows and of index keys, and the pages that sequences hold.

A page has the same number in both pools and in all layers, so one block table serves them all.
"""

from __future__ import annotations

import torch

from dsa_engine.config import ModelConfig
from dsa_engine.sequence import Sequence


def cache_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers: a latent row each, an index key where a layer selects.

    In float8_e4m3fn a latent row is its compressed part in FP8 with one float32 scale per 128 values, and its RoPE
    part in bfloat16 (656 bytes for 512 + 64); an index key is FP8 with one float32 scale (132 bytes for 128).
    """
    if dtype == torch.float8_e4m3fn:
        latent = config.kv_lora_rank + 4 * -(-config.kv_lora_rank // 128) + 2 * config.qk_rope_head_dim
        index_key = config.index_head_dim + 4
    else:
        latent = config.latent_dim * dtype.itemsize
        index_key = config.index_head_dim * dtype.itemsize
    return config.num_hidden_layers * latent + config.indexer_types.count("full") * index_key


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens fill."""
    return -(-tokens // page_size)


class KVCache:
    """The pools of one rank.

    ``latent[layer]`` is ``[pages, page_size, latent_dim]``: the normed compressed K/V and the rotated shared key.
    ``index_keys[layer]`` is ``[pages, page_size, index_head_dim]``, None for a layer without an indexer of its own.
    """

    def __init__(self, config: ModelConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device):
        self.pages = pages
        self.page_size = page_size

        def pool(width: int) -> torch.Tensor:
            # Not cleared: no row is read before it is written, and on a CPU untouched pages take no memory.
            return torch.empty(pages, page_size, width, dtype=dtype, device=device)

        self.latent = [pool(config.latent_dim) for _ in range(config.num_hidden_layers)]
        self.index_keys = [pool(config.index_head_dim) if t == "full" else None for t in config.indexer_types]

    def fill_random(self, pages: list[int], seed: int) -> None:
        """Standard normal rows in ``pages``, for measuring: they cost what computed rows cost."""
        device = self.latent[0].device
        numbers = torch.tensor(pages, dtype=torch.int64, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        for pool in [*self.latent, *self.index_keys]:
            if pool is not None:
                rows = torch.empty(len(pages), *pool.shape[1:], dtype=pool.dtype, device=device)
                pool[numbers] = rows.normal_(generator=generator)


class PageAllocator:
    """Hands out page numbers, lowest first when new, and takes them back."""

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` pages; the caller has made sure that there are as many."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free += reversed(pages)


class PageLedger:
    """How many pages every sequence holds on every rank, and the numbers of those on this rank.

    All ranks keep the same counts, as all take the same decisions; the numbers go to ``Sequence.pages``.

    Args:
        rank, world_size: this rank's place.
        pages: pages of the cache, the same on every rank.
    """

    def __init__(self, rank: int, world_size: int, pages: int):
        self.pages = pages
        self._rank = rank
        self._free = [pages] * world_size
        self._held: list[dict[Sequence, int]] = [{} for _ in range(world_size)]
        self._allocator = PageAllocator(pages)

    @property
    def free(self) -> list[int]:
        """Free pages of every rank."""
        return list(self._free)

    @property
    def own_free(self) -> int:
        """Page numbers that this rank has left to hand out: as many as its count in ``free``."""
        return self._allocator.free

    def held(self, sequence: Sequence, rank: int) -> int:
        """Pages of a sequence on a rank."""
        return self._held[rank].get(sequence, 0)

    def holders(self, rank: int) -> list[Sequence]:
        """The sequences that hold pages on a rank."""
        return list(self._held[rank])

    def take(self, sequence: Sequence, rank: int, count: int) -> None:
        """Gives a sequence ``count`` more pages on a rank; the caller has made sure that there are as many."""
        if count > self._free[rank]:
            raise RuntimeError(f"{count} pages asked for on rank {rank}, {self._free[rank]} are free")
        if rank == self._rank:
            sequence.pages += self._allocator.take(count)
        self._free[rank] -= count
        self._held[rank][sequence] = self.held(sequence, rank) + count

    def release(self, sequence: Sequence, rank: int) -> None:
        """Takes back all pages of a sequence on a rank, none where it holds none."""
        self._free[rank] += self._held[rank].pop(sequence, 0)
        if rank == self._rank:
            self._allocator.give_back(sequence.pages)
            sequence.pages = []

    def release_all(self, sequence: Sequence) -> None:
        """Takes back all pages of a sequence."""
        for rank in range(len(self._free)):
            self.release(sequence, rank)
