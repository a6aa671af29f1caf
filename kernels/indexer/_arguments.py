"""Checks of the arguments of the indexer's operations: queries, head weights and a paged pool of index keys."""

from __future__ import annotations

import torch

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.runtime.integers import cdiv


def check_indexer_arguments(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_tables: torch.Tensor, segments: Segments,
    key_format: IndexKeyFormat,
) -> None:  # fmt: skip
    """Raises ``ValueError`` or ``TypeError`` unless the arguments fit together."""
    fits = q.dim() == pool.dim() == 3 and q.shape[:2] == weights.shape
    if not fits or (q.shape[-1], pool.shape[-1]) != (key_format.dim, key_format.columns):
        raise ValueError(
            f"q {tuple(q.shape)}, weights {tuple(weights.shape)} and pool {tuple(pool.shape)} do not fit together"
        )
    if (q.dtype, pool.dtype) != (key_format.dtype, key_format.pool_dtype) or weights.dtype != torch.float32:
        raise TypeError(
            "q and pool must have the same dtype, or float8_e4m3fn and uint8, and weights float32; not "
            f"{q.dtype}, {pool.dtype} and {weights.dtype}"
        )
    if pool.stride(2) != 1 or (pool.shape[1] > 1 and pool.stride(1) != pool.shape[2]):
        raise ValueError(f"the rows of a page must be contiguous; the strides of the pool are {pool.stride()}")
    segments.check(q.shape[0], block_tables, pool.shape[1])


def read_index_keys(
    pool: torch.Tensor, block_table: torch.Tensor, start: int, stop: int, key_format: IndexKeyFormat
) -> torch.Tensor:
    """Index keys of the positions ``start … stop-1`` in float32 ``[stop-start, dim]``."""
    page_size = pool.shape[1]
    first, last = start // page_size, cdiv(stop, page_size)
    pages = pool.index_select(0, block_table[first:last])
    keys = key_format.unpack(pages).flatten(0, 1)
    return keys[start - first * page_size : stop - first * page_size].float()
