"""The format of a row of the paged caches: its numbers, how they are stored, at which columns, in how many bytes.

    latent row   [rank numbers, normed | rope numbers, rotated]      the key of all heads; the first part is their value
    index key    [dim numbers]

Rows are stored either as plain numbers of one floating dtype, or in FP8 as :mod:`.fp8_cache` defines it, in uint8
pools. Code that makes a pool, counts its bytes, writes its rows or reads them is given a format; no operation guesses
it from a pool's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from dsa_engine.kernels.formats.fp8_cache import (
    LATENT_BLOCK,
    SCALE_BYTES,
    index_key_views,
    latent_row_bytes,
    pack_latent_rows,
    unpack_latent_rows,
)
from dsa_engine.kernels.formats.hadamard import check_size
from dsa_engine.kernels.formats.quantize import FP8, quantize_rows_reference
from dsa_engine.kernels.runtime.integers import cdiv

ROW_ALIGNMENT = 16  # bytes: a row of the packed buffer is loaded 16 bytes at a time


class RowFormat(ABC):
    """The common part of both kinds of rows. ``dtype`` is that of the stored numbers; float8_e4m3fn means FP8."""

    dtype: torch.dtype

    @cached_property
    def fp8(self) -> bool:
        return self.dtype == FP8

    @cached_property
    def pool_dtype(self) -> torch.dtype:
        return torch.uint8 if self.fp8 else self.dtype

    @property
    @abstractmethod
    def width(self) -> int:
        """Numbers of a row."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Elements of ``pool_dtype`` of a row."""

    @property
    def row_bytes(self) -> int:
        return self.columns * self.pool_dtype.itemsize

    @abstractmethod
    def pack_pages(self, rows: torch.Tensor) -> torch.Tensor:
        """Numbers ``[pages, page_size, width]`` as a pool holds them: ``[pages, page_size, columns]``."""

    @abstractmethod
    def unpack_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`pack_pages`: numbers in the pool's dtype, or in float32 from FP8."""

    def check_pool(self, pool: torch.Tensor) -> None:
        """Raises ``ValueError`` unless ``pool [pages, page_size, columns]`` can hold such rows."""
        if pool.dim() != 3 or pool.shape[-1] != self.columns or pool.dtype != self.pool_dtype:
            raise ValueError(
                f"a pool of {self} is {self.pool_dtype} [pages, page_size, {self.columns}], not {pool.dtype} "
                f"{list(pool.shape)}"
            )

    def empty_pool(self, pages: int, page_size: int, device: torch.device) -> torch.Tensor:
        """``[pages, page_size, columns]``, not cleared: on a CPU untouched pages take no memory."""
        return torch.empty(pages, page_size, self.columns, dtype=self.pool_dtype, device=device)

    def random_pages(self, pages: int, page_size: int, generator: torch.Generator) -> torch.Tensor:
        """Standard normal numbers as a pool holds them, ``[pages, page_size, columns]``, on the generator's device."""
        dtype = torch.float32 if self.fp8 else self.dtype
        rows = torch.empty(pages, page_size, self.width, dtype=dtype, device=generator.device)
        return self.pack_pages(rows.normal_(generator=generator))


@dataclass(frozen=True)
class LatentFormat(RowFormat):
    """Format of latent rows.

    Raises:
        ValueError: FP8 for a rank that is no multiple of 128, or for an odd number of rotated numbers.
    """

    rank: int
    rope: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.fp8 and (self.rank % LATENT_BLOCK or self.rank == 0):
            raise ValueError(f"an FP8 latent pool needs a rank that is a multiple of {LATENT_BLOCK}, not {self.rank}")
        if self.fp8 and self.rope % 2:
            raise ValueError(f"an FP8 latent pool needs an even number of rotated numbers, not {self.rope}")

    @cached_property
    def width(self) -> int:
        return self.rank + self.rope

    @cached_property
    def columns(self) -> int:
        return latent_row_bytes(self.rank, self.rope) if self.fp8 else self.width

    @cached_property
    def rotated_at(self) -> int:
        """The column of the first rotated number."""
        return self.columns - (2 * self.rope if self.fp8 else self.rope)

    def pack(self, rows: torch.Tensor, power_of_two: bool = False) -> torch.Tensor:
        """Numbers ``[..., width]`` as a pool holds them: ``[..., columns]``."""
        return pack_latent_rows(rows, self.rank, power_of_two) if self.fp8 else rows

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a pool, ``[..., columns]``, as numbers ``[..., width]``: in their dtype, or in float32 from FP8."""
        return unpack_latent_rows(rows, self.rank) if self.fp8 else rows

    def pack_pages(self, rows: torch.Tensor) -> torch.Tensor:
        return self.pack(rows)

    def unpack_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return self.unpack(pages)

    def rows(self, pool: torch.Tensor) -> torch.Tensor:
        """The rows of a pool as kernels address them: ``[rows, columns]``, or int32 ``[rows, columns / 4]``, words of
        four bytes, of an FP8 pool."""
        flat = pool.view(-1, self.columns)
        return flat.view(torch.int32) if self.fp8 else flat


@dataclass(frozen=True)
class IndexKeyFormat(RowFormat):
    """Format of index keys. In an FP8 pool the scales of a page's keys lie after the values of all of them."""

    dim: int
    dtype: torch.dtype

    @cached_property
    def width(self) -> int:
        return self.dim

    @cached_property
    def columns(self) -> int:
        return self.dim + SCALE_BYTES if self.fp8 else self.dim

    def scales_at(self, page_size: int) -> int:
        """The byte of a page's first scale, in FP8."""
        return page_size * self.dim

    def pack_pages(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.fp8:
            return rows
        pages = self.empty_pool(rows.shape[0], rows.shape[1], rows.device)
        values, scales = index_key_views(pages)
        codes, factors = quantize_rows_reference(rows, self.dim, power_of_two=False)
        values.copy_(codes)
        scales.copy_(factors.squeeze(-1))
        return pages

    def unpack_pages(self, pages: torch.Tensor) -> torch.Tensor:
        values, scales = self.views(pages)
        return values if scales is None else values.float() * scales[..., None]

    def views(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values ``[pages, page_size, dim]``, plain or e4m3, and float32 scales ``[pages, page_size]`` in FP8, else
        None."""
        return index_key_views(pool) if self.fp8 else (pool, None)


@dataclass(frozen=True)
class CacheFormat:
    """Formats of both caches of a model."""

    latent: LatentFormat
    index_key: IndexKeyFormat | None  # None: the model has no indexer
    power_of_two: bool = False  # scales of FP8 rows are rounded up to powers of two when they are written

    @classmethod
    def of(
        cls, kv_lora_rank: int, rope_dim: int, index_head_dim: int, dtype: torch.dtype, power_of_two: bool = False
    ) -> CacheFormat:
        """The format for a model's sizes (``index_head_dim`` 0: no indexer) in ``dtype``; float8_e4m3fn means FP8.

        Raises:
            ValueError: FP8 for a rank that is no multiple of 128, or an index key that is no power of two from 4 on:
                the Hadamard transform, which its numbers pass first, needs a power of two, and scales begin at
                multiples of 4 bytes.
        """
        if dtype == FP8 and index_head_dim:
            check_size(index_head_dim)
            if index_head_dim % SCALE_BYTES:
                raise ValueError(f"an FP8 index key needs at least {SCALE_BYTES} numbers, not {index_head_dim}")
        index_key = IndexKeyFormat(index_head_dim, dtype) if index_head_dim else None
        return cls(LatentFormat(kv_lora_rank, rope_dim, dtype), index_key, power_of_two)

    @property
    def fp8(self) -> bool:
        return self.latent.fp8

    def packed_width(self, index_key: bool = True) -> int:
        """Columns of a buffer whose rows hold a latent row and, with ``index_key``, an index key after it, padded so
        that every row begins at a multiple of 16 bytes: 704 for 576 + 128 numbers of 2 bytes, 800 for 656 + 132
        bytes."""
        columns = self.latent.columns + (self.index_key.columns if index_key and self.index_key else 0)
        step = ROW_ALIGNMENT // self.latent.pool_dtype.itemsize
        return cdiv(columns, step) * step
