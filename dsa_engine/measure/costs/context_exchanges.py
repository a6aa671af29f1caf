"""Collectives of attention in a layer, and their bytes, by the sizes of the groups (docs/CONTEXT_PARALLEL.md).

In prefill the cp group gathers the cache rows of a step, and the ranks that hold a context together (``dcp_size``)
those of its earlier steps. In decode the latter gather queries, and return what each has attended to.
"""

from __future__ import annotations

from typing import NamedTuple

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.indexer.nth_largest import FEW_ROWS
from dsa_engine.parallel.links import Links


class Exchange(NamedTuple):
    """A collective of a group of ``ranks`` ranks."""

    name: str
    ranks: int
    part: float  # bytes of a rank, which all others get; of an all-to-all: for each other rank
    gathers: bool = True  # else an all-to-all

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, and gets."""
        return (self.ranks - 1) * self.part

    def seconds(self, links: Links, node_size: int) -> float:
        """Modelled."""
        group = self.ranks, -(-self.ranks // node_size)
        return (links.ring if self.gathers else links.all_to_all)(*group, self.part)


def prefill_exchanges(
    cache: CacheFormat, rows: float, earlier: float, cp_size: int, dcp_size: int, *, indexer: bool
) -> list[Exchange]:
    """Of a layer in a step with ``rows`` rows of each rank, whose requests have ``earlier`` tokens in the caches."""
    width = row_bytes(cache, indexer=indexer)
    exchanges = [Exchange("cache rows of the step", cp_size, rows * width)]
    if earlier and dcp_size > 1:
        exchanges.append(Exchange("cache rows of earlier steps", dcp_size, earlier / dcp_size * width))
    return [one for one in exchanges if one.ranks > 1]


def decode_exchanges(
    config: ModelConfig, cache: CacheFormat, rows: float, dcp_size: int, *, indexer: bool, itemsize: int = 2
) -> list[Exchange]:
    """Of a layer in a step with ``rows`` rows of each rank; ``indexer``: whether the layer has one."""
    if dcp_size == 1:
        return []
    heads, n, together = config.num_attention_heads, dcp_size, dcp_size * rows
    exchanges = [Exchange("cache rows", n, rows * row_bytes(cache, indexer=indexer))]
    if indexer and cache.index_key is not None:
        query = config.index_n_heads * (config.index_head_dim * cache.index_key.dtype.itemsize + 4)
        keys = 8.0 * config.index_topk * rows
        exchanges.append(Exchange("index queries and head weights", n, rows * query))
        exchanges.append(Exchange("keys of candidates", n, keys, gathers=together <= FEW_ROWS))
        if together > FEW_ROWS:
            exchanges.append(Exchange("thresholds", n, 8 * rows))
    exchanges.append(Exchange("absorbed queries", n, rows * heads * config.latent_dim * itemsize))
    merged = rows * heads * (config.kv_lora_rank * itemsize + 4)
    return [*exchanges, Exchange("results and log-sum-exp", n, merged, gathers=False)]


def row_bytes(cache: CacheFormat, *, indexer: bool) -> int:
    """Bytes of a token's packed row on its way to other ranks."""
    return cache.packed_width(index_key=indexer) * cache.latent.pool_dtype.itemsize
