"""The paged caches: a pool of latent rows and a pool of index keys for every layer.

A page has the same number in both pools and in all layers, so one block table serves them all.
"""

from __future__ import annotations

import torch

from dsa_engine.model.config import ModelConfig


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
