"""The paged caches: a pool of latent rows and a pool of index keys for every layer.

A page has the same number in both pools and in all layers, so one block table serves them all.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.cache_format import CacheFormat
from dsa_engine.model.config import ModelConfig


def cache_format(config: ModelConfig, dtype: torch.dtype) -> CacheFormat:
    """How the model's caches are stored in ``dtype``; float8_e4m3fn means FP8: 656 bytes for a latent row of 512 + 64
    numbers, 132 for an index key of 128.

    Raises:
        ValueError: the model's sizes have no FP8 format.
    """
    return CacheFormat.of(config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim, dtype)


def cache_bytes_per_token(config: ModelConfig, format: CacheFormat) -> int:
    """Bytes that one token takes in the caches of all layers: a latent row each, an index key where a layer selects."""
    index_key = format.index_key.row_bytes if format.index_key else 0
    return len(config.indexer_types) * format.latent.row_bytes + config.indexer_types.count("full") * index_key


class KVCache:
    """The pools of one rank; with a configuration that has MTP modules (``ModelConfig.with_mtp``), theirs too.

    ``latent[layer]`` is ``[pages, page_size, format.latent.columns]``: the normed compressed K/V and the rotated shared
    key. ``index_keys[layer]`` is ``[pages, page_size, format.index_key.columns]``, None for a layer without an indexer
    of its own.
    """

    def __init__(self, config: ModelConfig, format: CacheFormat, pages: int, page_size: int, device: torch.device):
        self.format = format
        self.pages = pages
        self.page_size = page_size
        # Not cleared: no row is read before it is written.
        layers, keys = config.indexer_types, format.index_key
        self.latent = [format.latent.empty_pool(pages, page_size, device) for _ in layers]
        self.index_keys = [
            keys.empty_pool(pages, page_size, device) if keys and kind == "full" else None for kind in layers
        ]

    @property
    def bytes(self) -> int:
        """What all pools of this rank take."""
        return sum(pool.nbytes for pool in (*self.latent, *self.index_keys) if pool is not None)

    def fill_random(self, pages: list[int], seed: int) -> None:
        """Standard normal rows in ``pages``, for measuring: they cost what computed rows cost."""
        device = self.latent[0].device
        numbers = torch.tensor(pages, dtype=torch.int64, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        for pool in self.latent:
            pool[numbers] = self.format.latent.random_pages(len(pages), self.page_size, generator)
        for keys in self.index_keys:
            if keys is not None and self.format.index_key is not None:
                keys[numbers] = self.format.index_key.random_pages(len(pages), self.page_size, generator)
