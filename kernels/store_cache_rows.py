"""Latent rows and index keys that context parallelism gathered side by side, straight to their causal slots.

    row = [latent row | index key]      both as their pools hold them: numbers of one dtype, or the bytes of FP8

Both parts of a row go to the same slot of their pools, in one launch that reads the gathered buffer once. An FP8 index
key comes as its values and its scale, and goes to the two places that it has in a page (:mod:`.fp8_cache`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.fp8_cache import index_key_views
from dsa_engine.kernels.launch import runs_triton
from dsa_engine.kernels.paged import as_pool, copy_tile, find_places, rows_at_once, store_rows_reference

_WARPS = 4


def packed_width(latent: int, index_key: int, dtype: torch.dtype) -> int:
    """Columns of a buffer of rows with both parts, so that every row begins at a multiple of 16 bytes: 704 for
    576 + 128 numbers of 2 bytes, 800 for 656 + 132 bytes."""
    step = 16 // dtype.itemsize
    return -(-(latent + index_key) // step) * step


def store_cache_rows_reference(
    latent_pool: torch.Tensor, key_pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    border, dim = latent_pool.shape[2], key_pool.shape[2]
    store_rows_reference(latent_pool, rows[:, :border], slots)
    keys = rows[:, border : border + dim]
    if key_pool.dtype != torch.uint8:
        store_rows_reference(key_pool, keys, slots)
        return
    codes, scales = (view.view(torch.uint8) for view in index_key_views(key_pool))
    store_rows_reference(codes, keys[:, :-4], slots)
    store_rows_reference(scales.unflatten(-1, (-1, 4)), keys[:, -4:], slots)


@triton.jit(do_not_specialize=["count"])
def store_cache_rows_kernel(
    rows, slots, latents, keys, count, row_stride, latent_page_stride, key_page_stride,
    LATENT: tl.constexpr, LATENT_PADDED: tl.constexpr, KEY: tl.constexpr, KEY_PADDED: tl.constexpr,
    FP8: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """KEY counts the values of an index key, without its scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    page, place, keep = find_places(slots, row, count, PAGE_SIZE)
    source = rows + row[:, None] * row_stride
    copy_tile(source, latents + page * latent_page_stride + place * LATENT, keep, LATENT, LATENT_PADDED)
    at_page = keys + page * key_page_stride
    copy_tile(source + LATENT, at_page + place * KEY, keep, KEY, KEY_PADDED)
    if FP8:
        scale = tl.load((source + LATENT + KEY).to(tl.pointer_type(tl.float32)), mask=keep, other=0.0)
        tl.store((at_page + PAGE_SIZE * KEY + place * 4).to(tl.pointer_type(tl.float32)), scale, mask=keep)


def store_cache_rows(
    latent_pool: torch.Tensor, key_pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes both parts of ``rows`` to ``slots`` of their pools; rows with slot −1 are dropped.

    Args:
        latent_pool: ``[pages, page_size, latent]``, a floating dtype, or uint8 in FP8.
        key_pool: ``[pages, page_size, index_key]``, of the same dtype and pages.
        rows: ``[R, width]`` of the pools' dtype, any row stride; columns behind ``latent + index_key`` are padding
            (:func:`packed_width`).
        slots: ``[R]`` int32 or int64, in any order, none named twice.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    (count, width), (pages, page_size, latent), index_key = rows.shape, latent_pool.shape, key_pool.shape[2]
    if key_pool.shape[:2] != (pages, page_size) or width < latent + index_key:
        raise ValueError(
            f"rows {tuple(rows.shape)}, latent pool {tuple(latent_pool.shape)} and index-key pool "
            f"{tuple(key_pool.shape)} do not fit together"
        )
    if not rows.dtype == latent_pool.dtype == key_pool.dtype:
        raise ValueError(
            f"rows and pools must have one dtype, not {rows.dtype}, {latent_pool.dtype} and {key_pool.dtype}"
        )
    fp8 = rows.dtype == torch.uint8
    latent_pool = as_pool(latent_pool, slots, count, latent)
    key_pool = as_pool(key_pool, slots, count, index_key)
    if fp8 and any(n % 4 for n in (rows.data_ptr(), rows.stride(0), latent, index_key, key_pool.stride(0))):
        raise ValueError(f"FP8 rows and their parts must begin at multiples of 4 bytes; the stride is {rows.stride(0)}")
    if not runs_triton(rows):
        store_cache_rows_reference(latent_pool, key_pool, rows, slots)
    elif count:
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        key = index_key - 4 if fp8 else index_key
        padded, key_padded = triton.next_power_of_2(latent), triton.next_power_of_2(key)
        at_once = rows_at_once((padded + key_padded) * rows.element_size())
        store_cache_rows_kernel[(triton.cdiv(count, at_once),)](
            rows, slots, latent_pool, key_pool, count, rows.stride(0), latent_pool.stride(0), key_pool.stride(0),
            LATENT=latent, LATENT_PADDED=padded, KEY=key, KEY_PADDED=key_padded,
            FP8=fp8, PAGE_SIZE=page_size, ROWS=at_once, num_warps=_WARPS,
        )  # fmt: skip
