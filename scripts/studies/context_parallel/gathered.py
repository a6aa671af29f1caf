"""Context parallelism by one all-gather of cache rows: the engine's way (``model/attention.py``).

Each rank gets all latent rows and index keys, packed side by side, and computes all heads of its own tokens. The gather
is issued first and overlaps with work on local tokens.
"""

from __future__ import annotations

import torch

from context_parallel.division import Division
from context_parallel.form import CPForm, padded, to_all
from context_parallel.layer import Cache, DSASize, Tokens, as_segments
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows
from dsa_engine.parallel.collective_log import Collective


class HeadTail(CPForm):
    """Pieces r and ``2 · ranks − 1 − r`` of ``2 · ranks`` for rank r: the same causal work on all ranks."""

    name = "head-tail"

    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        gathering = self.group.all_gather_async(padded(tokens.cache_rows, division.rows))
        q = self.layer.absorb(tokens.q)
        cache = self.cache(division, gathering())
        return self.layer.values(self.attend(q, cache.latent, self.select(division, tokens, cache)))

    def cache(self, division: Division, gathered: torch.Tensor) -> Cache:
        """The gathered rows ``[ranks * rows, width]`` at their slots."""
        cache = Cache.empty(self.layer.size, division.length, gathered.dtype, gathered.device)
        slots = division.slots(gathered.device)
        store_cache_rows(cache.latent, cache.index_keys, gathered, slots, self.layer.key_format)
        return cache

    def select(self, division: Division, tokens: Tokens, cache: Cache) -> torch.Tensor:
        """Slots that this rank's tokens attend to."""
        segments = as_segments(division.segments[self.group.index], tokens.q.device)
        self.count_scored(segments.visible)
        return self.layer.select(tokens, segments, cache)

    @classmethod
    def collectives(cls, size: DSASize, division: Division, itemsize: int) -> list[Collective]:
        return [to_all("all_gather", division.ranks, division.rows * size.cache_row * itemsize)]

    @classmethod
    def held_bytes(cls, size: DSASize, division: Division, itemsize: int) -> int:
        """Bytes of every token's cache row and of the selection of its own tokens."""
        return division.length * size.cache_row * itemsize + division.rows * size.topk * 4


class Contiguous(HeadTail):
    """The same with one contiguous piece per rank: the tokens of the last rank see the most."""

    name = "contiguous"
    layout = "contiguous"
