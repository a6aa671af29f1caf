"""Latent rows and index keys that context parallelism gathered side by side, straight to their causal slots.

    row = [latent row | index key]      both as their pools hold them: numbers of one dtype, or codes

Both parts of a row go to the same slot of their pools, in one launch that reads the gathered buffer once. A coded
index key comes as its values and its scale, which lie apart in a page (:mod:`.formats.row_format`).

Bits: rows are copied.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.rows.paged import as_pool, copy_tile, page_and_offset, rows_at_once, store_rows_reference
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_WARPS = 4


def store_cache_rows_reference(
    latent_pool: torch.Tensor,
    key_pool: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    key_format: IndexKeyFormat,
) -> None:
    border = latent_pool.shape[2]
    store_rows_reference(latent_pool, rows[:, :border], slots)
    values, scales = key_format.views(key_pool)
    store_rows_reference(values.view(rows.dtype), rows[:, border : border + key_format.dim], slots)
    if scales is not None:
        as_bytes = scales.view(rows.dtype).unflatten(-1, (key_pool.shape[1], -1))  # [pages, page_size, 4]
        store_rows_reference(as_bytes, rows[:, border + key_format.dim : border + key_format.columns], slots)


@kernel(do_not_specialize=["count"])
def store_cache_rows_kernel(
    rows, slots, latents, keys, count, row_stride, latent_page_stride, key_page_stride,
    LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, KEY: tl.constexpr, KEY_PADDED: tl.constexpr,
    CODED: tl.constexpr, SCALES_AT: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """KEY counts the values of an index key, without its scale; a page's scales begin at SCALES_AT."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    page, offset, keep = page_and_offset(slots, row, count, PAGE_SIZE)
    source = rows + row[:, None] * row_stride
    copy_tile(source, latents + page * latent_page_stride + offset * LATENT, keep, LATENT, LATENT_PADDED)
    at_page = keys + page * key_page_stride
    copy_tile(source + LATENT, at_page + offset * KEY, keep, KEY, KEY_PADDED)
    if CODED:
        scale = tl.load((source + LATENT + KEY).to(tl.pointer_type(tl.float32)), mask=keep, other=0.0)
        tl.store((at_page + SCALES_AT + offset * 4).to(tl.pointer_type(tl.float32)), scale, mask=keep)


@operation(writes=("latent_pool", "key_pool"), waits=True)
def store_cache_rows(
    latent_pool: torch.Tensor,
    key_pool: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    key_format: IndexKeyFormat,
) -> None:
    """Writes both parts of ``rows`` to ``slots`` of their pools; rows with slot −1 are dropped.

    Args:
        latent_pool: ``[pages, page_size, latent]``.
        key_pool: ``[pages, page_size, index_key]`` in ``key_format``, of the same dtype and page size.
        rows: ``[R, width]`` of the pools' dtype, any row stride; columns after ``latent + index_key`` are padding
            (:meth:`.CacheFormat.packed_width`).
        slots: ``[R]`` int32 or int64, in any order, none named twice.
        key_format: format of the index keys; latent rows are copied whole.
    """
    (count, width), (_, page_size, latent), index_key = rows.shape, latent_pool.shape, key_pool.shape[2]
    if key_pool.shape[1] != page_size or width < latent + index_key:
        raise ValueError(
            f"rows {tuple(rows.shape)}, latent pool {tuple(latent_pool.shape)} and index-key pool "
            f"{tuple(key_pool.shape)} do not fit together"
        )
    if not rows.dtype == latent_pool.dtype == key_pool.dtype:
        raise ValueError(
            f"rows and pools must have one dtype, not {rows.dtype}, {latent_pool.dtype} and {key_pool.dtype}"
        )
    key_format.check_pool(key_pool)
    latent_pool = as_pool(latent_pool, slots, count, latent)
    key_pool = as_pool(key_pool, slots, count, index_key)
    step = key_format.alignment
    if step > 1 and (rows.data_ptr() | rows.stride(0) | latent | index_key | key_pool.stride(0)) % step:
        raise ValueError(
            f"rows and their parts must begin at multiples of {step} bytes; the stride is {rows.stride(0)}"
        )
    if not runs_triton(rows):
        store_cache_rows_reference(latent_pool, key_pool, rows, slots, key_format)
    elif count:
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        key = key_format.dim
        padded, key_padded = next_power_of_2(latent), next_power_of_2(key)
        at_once = rows_at_once((padded + key_padded) * rows.element_size())
        store_cache_rows_kernel[(cdiv(count, at_once),)](
            rows, slots, latent_pool, key_pool, count, rows.stride(0), latent_pool.stride(0), key_pool.stride(0),
            LATENT=latent, LATENT_PADDED=padded, KEY=key, KEY_PADDED=key_padded,
            CODED=key_format.coded, SCALES_AT=key_format.scales_at(page_size), PAGE_SIZE=page_size, ROWS=at_once,
            num_warps=_WARPS,
        )  # fmt: skip
