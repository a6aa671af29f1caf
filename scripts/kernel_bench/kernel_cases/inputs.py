"""Cases and their inputs at given sizes: random values for measuring, or untouched memory for compiling only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_engine.kernels.formats.row_format import IndexKeyFormat, LatentFormat
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.integers import cdiv

PAGE_SIZE = 64
HIDDEN, RANK, ROPE, INDEX_DIM, TOPK = 7168, 512, 64, 128, 2048  # DeepSeek-V3.2

Call = Callable[[], Any]


@dataclass(frozen=True)
class KernelCase:
    """One operation at one size, with its inputs."""

    kernel: str
    shape: str
    run: Call
    bytes: float  # minimum bytes to move: every input read once, every output written once
    flops: float = 0.0  # required floating-point operations
    baselines: Mapping[str, Call] = field(default_factory=dict)  # the same result by other means, beside the reference
    product: bool = False  # tensor-core work, compared with a matrix product; otherwise with a copy
    needs: int = 0  # compute capability below which no GPU has the instructions


def referenced(call: Call) -> Call:
    """The call with the PyTorch references of the operations in it."""

    def run_references() -> None:
        with launch.references():
            call()

    return run_references


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
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, untouched: bool = False):
        self.device, self.dtype, self._untouched = device, dtype, untouched
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal values."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return out if self._untouched else out.normal_(generator=self._generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape, dtype=torch.float32)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.device)
        return out if self._untouched else out.zero_()

    def fp8(self, *shape: int) -> torch.Tensor:
        if self._untouched:
            return torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        return self.normal(*shape).to(torch.float8_e4m3fn)

    def codes(self, *shape: int) -> torch.Tensor:
        """int8, evenly distributed."""
        out = torch.empty(shape, dtype=torch.int8, device=self.device)
        return out if self._untouched else out.random_(-127, 128, generator=self._generator)

    def scales(self, *shape: int) -> torch.Tensor:
        """float32, above 0."""
        out = torch.empty(shape, device=self.device)
        return out if self._untouched else out.uniform_(0.5, 1.0, generator=self._generator).div_(100)

    def whole(self, end: int, *shape: int) -> torch.Tensor:
        """int32 below ``end``."""
        return torch.randint(end, shape, generator=self._generator, device=self.device, dtype=torch.int32)

    def order(self, count: int) -> torch.Tensor:
        """int32 ``[count]``: each number below ``count`` once."""
        return torch.randperm(count, generator=self._generator, device=self.device).int()

    def block_tables(self, sequences: int, tokens: int) -> tuple[torch.Tensor, int]:
        """Pages of ``sequences`` that hold ``tokens`` each, in random order: int32 ``[sequences, pages a sequence]``,
        and the number of all pages."""
        each = cdiv(tokens, PAGE_SIZE)
        return self.order(sequences * each).view(sequences, each), sequences * each

    def pool(self, pages: int, row_format: LatentFormat | IndexKeyFormat) -> torch.Tensor:
        out = row_format.empty_pool(pages, PAGE_SIZE, self.device)
        for part in () if self._untouched else out.split(1024):  # bounded temporaries
            part.copy_(row_format.random_pages(part.shape[0], PAGE_SIZE, self._generator))
        return out

    def selected(self, tokens: int, context: int, k: int) -> torch.Tensor:
        """int32 ``[tokens, k]`` rows of a pool with ``context`` tokens, ascending and distinct: one random row from
        each of k intervals, as selections are spread over a context."""
        k = min(k, context)
        stretch = context // k
        return self.whole(stretch, tokens, k).add_(torch.arange(k, device=self.device, dtype=torch.int32) * stretch)

    def prefill(self, queries: int, context: int) -> Segments:
        """The last ``queries`` tokens of one sequence of ``context`` tokens."""
        return Segments.of([Segment(0, queries, 0, context - queries)], self.device)

    def decode(self, batch: int, context: int) -> Segments:
        """One query for each of ``batch`` sequences of ``context`` tokens."""
        return Segments.of([Segment(i, 1, i, context - 1) for i in range(batch)], self.device)
