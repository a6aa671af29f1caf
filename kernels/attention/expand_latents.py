"""Coded latent rows as plain ones, once a layer for a prefill whose queries read each of them many times.

    rows[i, j] = numbers of the row j of page pages[i], in the queries' dtype       as :mod:`.gather_latent` has them
    slots'     = index_of_page[slot // page_size] · page_size + slot % page_size    −1 stays −1

Bits: each row is expanded by itself.
"""

from __future__ import annotations

import torch

from dsa_engine.kernels.attention.gather_latent import launch_gather
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.runtime.launch import chip_of, is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

_MAX_TOKENS = 524_288  # 604 MB of 576 numbers of two bytes
# A query with 128 heads and 2,048 slots is worth the expansion of so many rows: on an H100 with Triton's kernels, 1,808
# bytes against 283 instead of 316 TFLOP/s. With faster attention to plain rows it is worth more.
_ROWS_A_QUERY, _SLOTS_AND_HEADS = 370, 128 * 2048


def max_tokens(x: torch.Tensor, row_format: LatentFormat, workspace: int) -> int:
    """Largest number of tokens whose rows are expanded, into ``workspace`` bytes at most, for queries like ``x``.

    Measured on compute capability 9.0, so 0 on others; and under batch invariance, as it follows the number of queries.
    """
    if not row_format.coded or x.element_size() != 2 or not runs_triton(x) or is_batch_invariant():
        return 0
    return min(_MAX_TOKENS, workspace // (2 * row_format.width)) if chip_of(x).capability == 90 else 0


def pays(q: torch.Tensor, slots: torch.Tensor, segments: Segments, row_format: LatentFormat, workspace: int) -> bool:
    """Whether to expand the rows that the queries of ``segments`` see before they attend to ``slots``."""
    tokens, expanded = sum(segments.contexts.values()), _ROWS_A_QUERY * slots.numel() * q.shape[1]
    return tokens * _SLOTS_AND_HEADS < expanded and tokens <= max_tokens(q, row_format, workspace)


def expand_latents_reference(
    pool: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, index_of_page: torch.Tensor,
    row_format: LatentFormat, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    page_size = pool.shape[1]
    known = slots.clamp(min=0)
    moved = index_of_page[known // page_size] * page_size + known % page_size
    return row_format.unpack(pool[pages.long()]).to(dtype), moved.masked_fill_(slots < 0, -1)


@operation()
def expand_latents(
    pool: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, index_of_page: torch.Tensor,
    row_format: LatentFormat, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Expands pages of a pool, and moves slots to them.

    Args:
        pool: ``[pages, page_size, columns]`` in ``row_format``, whose rows are codes.
        slots: int32 ``[T, k]`` of rows in ``pages``, or −1.
        pages: ``[n]`` int32, in any order.
        index_of_page: ``[pages of the pool]`` int32: where a page is in ``pages``; of others it may be anything.

    Returns:
        ``[n, page_size, width]`` in ``dtype``; int32 ``[T, k]``.
    """
    row_format.check_pool(pool)
    if not runs_triton(pool):
        return expand_latents_reference(pool, slots, pages, index_of_page, row_format, dtype)
    out = torch.empty(len(pages) * pool.shape[1], row_format.width, dtype=dtype, device=pool.device)
    slots = slots.contiguous()
    launch_gather(pool, pages, pool.shape[1], out, row_format, slots, index_of_page, moved := torch.empty_like(slots))
    return out.unflatten(0, (-1, pool.shape[1])), moved
