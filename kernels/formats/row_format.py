"""The interface of a row's format in the paged caches: its numbers, how they are stored, at which columns, in how many
bytes, and what kernels call to write and read them.

    latent row   [rank numbers, normed | rope numbers, rotated]      the key of all heads; the first part is their value
    index key    [dim numbers]

Code that makes a pool, counts its bytes, writes its rows or reads them is given a format; no operation guesses it from
a pool's dtype. A dtype of caches is a file of this folder with both classes, and an entry in :mod:`.cache_format`.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch

from dsa_engine.kernels.runtime.launch import Chip


@dataclass(frozen=True, eq=False)
class Helpers:
    """Triton functions of a format: a kernel has them as one constexpr.

    Attributes of latent rows:
        coded: rows take two steps, ``load`` to words and ``expand`` to numbers, so that a loop can load the words of a
            later step while it works with the numbers of this one; if not, ``load`` gives numbers.
        columns: the column of a row at each index of a tile of values ``[rows, BLOCK]``.
        load: rows ``row [rows]`` (32 bits) as tiles ``[rows, BLOCK_VALUE]`` and ``[rows, BLOCK_ROTATED]``; if coded,
            three tensors of 32-bit numbers, of which ``expand`` makes both tiles.
        store: stores the normed numbers ``latent`` of the rows at ``target [rows, 1]``, and returns where the rotated
            pairs (a, b) go, and both as they are stored.

    Attributes of index keys:
        coded: a key has a float32 scale, which lies apart.
        encode: rows in parts, as :func:`.rope.load_pairs` has them, to codes ``[rows, DIM]`` and scales ``[rows, 1]``.
        operand: loaded values as products take them.
    """

    coded: bool
    columns: Any = None
    load: Any = None
    expand: Any = None
    store: Any = None
    encode: Any = None
    operand: Any = None

    @property
    def cache_key(self) -> str:
        """Triton compiles a kernel again where a function has changed."""
        values = (getattr(self, field.name) for field in fields(self))
        return "".join(getattr(value, "cache_key", str(value)) for value in values)


class RowFormat(ABC):
    """The common part of both kinds of rows.

    Attributes:
        dtype: dtype of the stored numbers, or of their codes.
        coded: rows are codes with scales, and are expanded to be read; if not, plain numbers of ``dtype``.
        alignment: bytes; a row and its parts begin at their multiples.
        power_of_two: scales of coded rows are rounded up to powers of two when they are written.
        helpers: what kernels call.
    """

    dtype: torch.dtype
    helpers: ClassVar[Helpers]
    coded: ClassVar[bool]
    alignment: ClassVar[int]
    power_of_two: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The format's name, as the option ``kv_cache_dtype`` has it."""

    @cached_property
    def pool_dtype(self) -> torch.dtype:
        return torch.uint8 if self.coded else self.dtype

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
    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Numbers ``[pages, page_size, width]``, or latent rows ``[..., width]``, as a pool holds them: ``[...,
        columns]``."""

    @abstractmethod
    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`pack`: numbers in the pool's dtype, or in float32 from codes."""

    def check_pool(self, pool: torch.Tensor) -> None:
        """Raises ``ValueError`` unless ``pool [pages, page_size, columns]`` can hold such rows."""
        if pool.dim() != 3 or pool.shape[-1] != self.columns or pool.dtype != self.pool_dtype:
            raise ValueError(
                f"a pool of {self} is {self.pool_dtype} [pages, page_size, {self.columns}], not {pool.dtype} "
                f"{list(pool.shape)}"
            )

    def empty_pool(self, pages: int, page_size: int, device: torch.device) -> torch.Tensor:
        """``[pages, page_size, columns]``, zeros: on a CPU untouched pages take no memory."""
        shape = pages, page_size, self.columns
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.pool_dtype, device=device)
        # Of the system, as PyTorch writes its zeros.
        size = math.prod(shape) * self.pool_dtype.itemsize
        zeros = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(zeros, dtype=torch.uint8).view(self.pool_dtype).view(shape)

    def random_pages(self, pages: int, page_size: int, generator: torch.Generator) -> torch.Tensor:
        """Standard normal numbers as a pool holds them, ``[pages, page_size, columns]``, on the generator's device."""
        dtype = torch.float32 if self.coded else self.dtype
        rows = torch.empty(pages, page_size, self.width, dtype=dtype, device=generator.device)
        return self.pack(rows.normal_(generator=generator))


@dataclass(frozen=True)
class LatentFormat(RowFormat):
    """Format of latent rows.

    Attributes:
        least_block: fewest columns of a tile of values.
        rotated_at: the column of the first rotated number.
    """

    rank: int
    rope: int

    least_block: ClassVar[int]

    @cached_property
    def width(self) -> int:
        return self.rank + self.rope

    @property
    @abstractmethod
    def rotated_at(self) -> int: ...

    def reads_as(self, dtype: torch.dtype) -> bool:
        """Whether kernels read rows as numbers of ``dtype``."""
        return self.coded or self.dtype == dtype

    def rows(self, pool: torch.Tensor) -> torch.Tensor:
        """The rows of a pool as kernels address them: ``[rows, columns]``, or int32 ``[rows, columns / 4]``, words of
        four bytes, of a pool of codes."""
        flat = pool.view(-1, self.columns)
        return flat.view(torch.int32) if self.coded else flat


@dataclass(frozen=True)
class IndexKeyFormat(RowFormat):
    """Format of index keys. In a pool of codes the scales of a page's keys lie after the values of all of them.

    Attributes:
        least_part: fewest columns of a part of a key in a kernel that encodes it.
    """

    dim: int

    least_part: ClassVar[int]

    @cached_property
    def width(self) -> int:
        return self.dim

    def scales_at(self, page_size: int) -> int:
        """The byte of a page's first scale, in a pool of codes."""
        return page_size * self.dim

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys or queries ``[..., dim]`` as they are stored and multiplied: in ``dtype``, and float32 scales
        ``[..., 1]`` of codes, else None."""

    @abstractmethod
    def views(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values ``[pages, page_size, dim]`` in ``dtype``, and float32 scales ``[pages, page_size]`` of codes, else
        None."""

    @abstractmethod
    def operands(self, q: torch.Tensor, keys: torch.Tensor, chip: Chip) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and the keys of :meth:`views`, as a kernel for ``chip`` is given them."""

    @abstractmethod
    def rows_at_once(self, x: torch.Tensor) -> int:
        """Rows of a tile of a kernel that encodes rows of the dtype and device of ``x``."""
