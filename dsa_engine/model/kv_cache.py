"""The paged caches: a pool of latent rows and a pool of index keys for every layer.

A page has the same number in both pools and in all layers, so one block table serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.formats.cache_format import NAMES, CacheFormat
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.forward_batch import BlockTables, ForwardBatch, ShardTables
from dsa_engine.model.pages.hot_rows import HotRows
from dsa_engine.model.pages.page_map import PageMap, host_memory
from dsa_engine.parallel.group import Group


def cache_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """dtype of the caches of an engine that computes in ``dtype``, by the option's value; of codes, their dtype."""
    if kv_cache_dtype in NAMES:
        return NAMES[kv_cache_dtype]
    if kv_cache_dtype == "bfloat16" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"kv_cache_dtype='bfloat16' needs an engine that computes in bfloat16; this one computes in {name}: give "
            f"dtype='bfloat16' too, or kv_cache_dtype 'auto' ({name}) or 'fp8'"
        )
    return dtype


def cache_format(config: ModelConfig, dtype: torch.dtype) -> CacheFormat:
    """The format of the model's caches in ``dtype``. Scales of codes are powers of two if the checkpoint's scales are;
    ``ValueError`` if the model's sizes have no such format."""
    sizes = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
    schemes = config.quantization.schemes if config.quantization else ()
    power_of_two = any(scheme.power_of_two for scheme in schemes)
    try:
        return CacheFormat.of(*sizes, dtype, power_of_two)
    except ValueError as error:
        raise ValueError(
            f"such caches are not possible for this model (kv_lora_rank {sizes[0]}, qk_rope_head_dim {sizes[1]}, "
            f"index_head_dim {sizes[2]}): {error}; use kv_cache_dtype='auto'"
        ) from error


def cache_bytes_per_token(config: ModelConfig, format: CacheFormat) -> int:
    """Bytes of one token in the caches of all layers."""
    return sum(map(sum, pool_page_bytes(config, format, page_size=1)))


def pool_page_bytes(config: ModelConfig, format: CacheFormat, page_size: int) -> list[list[int]]:
    """Bytes of a page in the pools of every layer: of latent rows and, in a layer with an indexer, of index keys."""
    latent = page_size * format.latent.row_bytes
    keys = [page_size * format.index_key.row_bytes] if format.index_key else []
    return [[latent, *(keys if kind == "full" else [])] for kind in config.indexer_types]


class KVCache:
    """The pools of one rank, those of MTP modules included if the configuration has them (``ModelConfig.with_mtp``).

    ``latent[layer]`` is ``[pages, page_size, format.latent.columns]``: the normed compressed K/V and the rotated shared
    key. ``index_keys[layer]`` is ``[pages, page_size, format.index_key.columns]``, None for a layer without an indexer.
    With hot rows there are ``spilled`` further pages: ``index_keys`` has them too, but their latent rows lie in
    ``host_latent[layer]``; in ``latent[layer]`` copies of some of these rows follow the pages, ``hot_pages`` of them.
    ``block_tables`` has the pages of requests that steps have run. ``group``: the ranks that hold pages together, whose
    number contains the rank (``context_shards.py``); None: this one alone. ``before_use`` and ``after_store`` are hooks
    of what moves pages: a layer calls each with its number before it uses its pools, and when it has stored the step's
    rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        format: CacheFormat,
        pages: int,
        page_size: int,
        device: torch.device,
        group: Group | None = None,
        spilled: int = 0,
        sets: int = 0,
        hot_rows: int = 0,
    ):
        """``sets``: of ``hot_rows`` hot rows, one for each request of the group in a decode step."""
        self.format = format
        self.pages, self.spilled = pages, spilled
        self.hot_pages = cdiv(sets * hot_rows, page_size)
        self.page_size = page_size
        self.group = None if group is None or group.size == 1 else group
        self.block_tables = BlockTables(page_size, device)
        if self.group is not None:
            self.block_tables = ShardTables(page_size, device, self.group, pages + spilled)
        self.before_use: list[Callable[[int], None]] = []
        self.after_store: list[Callable[[int], None]] = []
        # Zeros: the rows of modules that have not run (``draft_number.py``) are read like others.
        layers, keys = config.indexer_types, format.index_key
        self.latent = [format.latent.empty_pool(pages + self.hot_pages, page_size, device) for _ in layers]
        self.host_latent: list[torch.Tensor] = []
        if spilled:
            shape = spilled, page_size, format.latent.columns
            nbytes = len(layers) * spilled * page_size * format.latent.row_bytes
            memory = host_memory(nbytes, spilled, self if device.type == "cuda" else None)
            self.host_latent = [part.view(shape) for part in memory.view(format.latent.pool_dtype).chunk(len(layers))]
        self.index_keys = [
            keys.empty_pool(pages + spilled, page_size, device) if keys and kind == "full" else None for kind in layers
        ]
        self.hot = HotRows(layers, pages, self.latent, self.host_latent, sets, hot_rows) if spilled else None
        self.page_map = PageMap(self.latent, self.index_keys, self.host_latent, pages, self.hot)

    def use(self, layer: int) -> None:
        for hook in self.before_use:
            hook(layer)

    def stored(self, layer: int, batch: ForwardBatch) -> None:
        for hook in () if batch.first_micro_batch else self.after_store:
            hook(layer)

    @property
    def bytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.latent, *self.index_keys) if pool is not None)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.page_map.page_bytes

    def fill_random(self, pages: Sequence[int], seed: int) -> None:
        """Writes standard normal rows to ``pages``, for measuring: they cost as much as computed rows."""
        device = self.latent[0].device
        moved = self.page_map.moved(pages, torch.tensor(pages, dtype=torch.int64, device=device))
        generator = torch.Generator(device).manual_seed(seed)
        self.page_map.overwrite(pages)
        for kind, format in enumerate((self.format.latent, self.format.index_key)):
            for layer in self.page_map.layers:
                if format is not None and kind < len(layer):
                    rows = format.random_pages(len(pages), self.page_size, generator)
                    layer[kind].write(moved, layer[kind].of(rows))
