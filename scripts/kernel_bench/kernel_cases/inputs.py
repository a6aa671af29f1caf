"""Inputs for kernels at given sizes: random values for measuring, or untouched memory for compiling only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsa_engine.kernels.formats.cache_format import FP8, IndexKeyFormat, LatentFormat, RowFormat
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.integers import cdiv

PAGE_SIZE = 64


@dataclass(frozen=True)
class Sizes:
    """Measured sizes in tokens, rows and requests; the defaults are those of production."""

    contexts: tuple[int, ...] = (8_192, 32_768, 131_072)
    batches: tuple[int, ...] = (1, 8, 32, 128)  # requests of a decode step
    prefill: int = 4_096  # queries of a sparse-attention call
    scored: int = 1_024  # queries of an indexer call: as many as there is workspace for
    tokens: int = 8_192  # rows of a step, for operations by row
    # Experts and token-expert pairs of a rank: in prefill one of 64 ranks and one of 8, and the same in decode.
    experts: tuple[tuple[int, int], ...] = ((4, 16_384), (32, 65_536), (4, 64), (32, 1_024))
    max_cached: int = 4 << 20  # tokens in the caches of a decode batch

    @classmethod
    def small(cls) -> Sizes:
        """Sizes for trying the scripts on a CPU."""
        return cls((512,), (2,), 16, 16, 32, ((2, 8),), 2_048)


class Inputs:
    """Makes tensors on one device.

    Args:
        device: their device.
        dtype: dtype of activations and caches.
        untouched: allocate only. On a CPU, untouched memory takes no space, whatever its size.
        seed: seed of the random values.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, untouched: bool = False, seed: int = 0):
        self.device = device
        self.dtype = dtype
        self.untouched = untouched
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal values."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return out if self.untouched else out.normal_(generator=self._generator)

    def block_tables(self, sequences: int, tokens: int) -> tuple[torch.Tensor, int]:
        """Pages of ``sequences`` that hold ``tokens`` each, in random order: int32 ``[sequences, pages a sequence]``,
        and the number of all pages."""
        each = cdiv(tokens, PAGE_SIZE)
        order = torch.randperm(sequences * each, generator=self._generator, device=self.device)
        return order.int().view(sequences, each), sequences * each

    def pool(self, pages: int, width: int) -> torch.Tensor:
        return self.normal(pages, PAGE_SIZE, width)

    def fp8_latent_pool(self, pages: int, rank: int, rope: int) -> torch.Tensor:
        return self._random_pool(LatentFormat(rank, rope, FP8), pages)

    def fp8_index_pool(self, pages: int, dim: int) -> torch.Tensor:
        return self._random_pool(IndexKeyFormat(dim, FP8), pages)

    def _random_pool(self, row_format: RowFormat, pages: int) -> torch.Tensor:
        out = row_format.empty_pool(pages, PAGE_SIZE, self.device)
        if not self.untouched:
            for part in out.split(1024):  # bounded temporaries
                part.copy_(row_format.random_pages(part.shape[0], PAGE_SIZE, self._generator))
        return out

    def fp8(self, *shape: int) -> torch.Tensor:
        if self.untouched:
            return torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        return self.normal(*shape).to(torch.float8_e4m3fn)

    def codes(self, *shape: int) -> torch.Tensor:
        """int8, evenly distributed."""
        out = torch.empty(shape, dtype=torch.int8, device=self.device)
        return out if self.untouched else out.random_(-127, 128, generator=self._generator)

    def scales(self, *shape: int) -> torch.Tensor:
        """float32, above 0."""
        out = torch.empty(shape, device=self.device)
        return out if self.untouched else out.uniform_(0.5, 1.0, generator=self._generator).div_(100)

    def selected(self, tokens: int, context: int, k: int) -> torch.Tensor:
        """int32 ``[tokens, k]`` rows of a pool with ``context`` tokens, ascending and distinct: one random row from
        each of k intervals, as selections are spread over a context."""
        k = min(k, context)
        stretch = context // k
        offsets = torch.randint(stretch, (tokens, k), generator=self._generator, device=self.device, dtype=torch.int32)
        return offsets.add_(torch.arange(k, device=self.device, dtype=torch.int32) * stretch)

    def prefill(self, queries: int, context: int) -> Segments:
        """The last ``queries`` tokens of one sequence of ``context`` tokens."""
        return Segments.of([Segment(0, queries, 0, context - queries)], self.device)

    def decode(self, batch: int, context: int) -> Segments:
        """One query for each of ``batch`` sequences of ``context`` tokens."""
        return Segments.of([Segment(i, 1, i, context - 1) for i in range(batch)], self.device)
