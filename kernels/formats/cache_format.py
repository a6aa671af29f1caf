"""The formats of the paged caches, by the dtype of what is stored: :mod:`.plain_cache`, or a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsa_engine.kernels.formats.fp8_cache import FP8IndexKeys, FP8Latents
from dsa_engine.kernels.formats.plain_cache import PlainIndexKeys, PlainLatents
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.kernels.formats.row_format import IndexKeyFormat, LatentFormat
from dsa_engine.kernels.runtime.integers import cdiv

ROW_ALIGNMENT = 16  # bytes: a row of the packed buffer is loaded 16 bytes at a time

# Formats whose rows are codes, by the dtype of these; numbers of any other dtype are stored as they are.
CODED: dict[torch.dtype, tuple[Callable[[int, int, bool], LatentFormat], Callable[[int, bool], IndexKeyFormat]]] = {
    FP8: (FP8Latents, FP8IndexKeys)
}
# The values of the option kv_cache_dtype for them.
NAMES = {"fp8": FP8, "fp8_e4m3": FP8, "fp8_ds_mla": FP8}


def latent_format(rank: int, rope: int, dtype: torch.dtype, power_of_two: bool = False) -> LatentFormat:
    """The format of latent rows in ``dtype``; ``power_of_two``: of scales, if rows are coded."""
    return CODED[dtype][0](rank, rope, power_of_two) if dtype in CODED else PlainLatents(rank, rope, dtype)


def index_key_format(dim: int, dtype: torch.dtype, power_of_two: bool = False) -> IndexKeyFormat:
    """The format of index keys in ``dtype``."""
    return CODED[dtype][1](dim, power_of_two) if dtype in CODED else PlainIndexKeys(dim, dtype)


@dataclass(frozen=True)
class CacheFormat:
    """Formats of both caches of a model."""

    latent: LatentFormat
    index_key: IndexKeyFormat | None  # None: the model has no indexer

    @classmethod
    def of(
        cls, kv_lora_rank: int, rope_dim: int, index_head_dim: int, dtype: torch.dtype, power_of_two: bool = False
    ) -> CacheFormat:
        """The format for a model's sizes (``index_head_dim`` 0: no indexer) in ``dtype``; float8_e4m3fn means FP8.

        Raises:
            ValueError: sizes for which a format of codes has no rows.
        """
        index_key = index_key_format(index_head_dim, dtype, power_of_two) if index_head_dim else None
        return cls(latent_format(kv_lora_rank, rope_dim, dtype, power_of_two), index_key)

    @property
    def coded(self) -> bool:
        """Whether rows are codes, or plain numbers."""
        return self.latent.coded

    @property
    def name(self) -> str:
        return self.latent.name

    def packed_width(self, index_key: bool = True) -> int:
        """Columns of a buffer whose rows hold a latent row and, with ``index_key``, an index key after it, padded so
        that every row begins at a multiple of 16 bytes: 704 for 576 + 128 numbers of 2 bytes, 800 for 656 + 132
        bytes."""
        columns = self.latent.columns + (self.index_key.columns if index_key and self.index_key else 0)
        step = ROW_ALIGNMENT // self.latent.pool_dtype.itemsize
        return cdiv(columns, step) * step
