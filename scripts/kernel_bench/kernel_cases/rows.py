"""Operations that work row by row: norms, rotation, cache rows, quantisation. All are bound by memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dsa_engine.kernels.attention.gather_latent import gather_latent
from dsa_engine.kernels.formats.cache_format import FP8, CacheFormat, index_key_format, latent_format
from dsa_engine.kernels.formats.fp8 import dequantize_blocks
from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.formats.quantize import quantize_rows, quantized_words
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.fetch_rows import fetch_rows
from dsa_engine.kernels.rows.paged import gather_rows
from dsa_engine.kernels.rows.resolve_rows import resolve_rows
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.rows.rope import apply_rope
from dsa_engine.kernels.rows.segment import slots_of
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.kernels.rows.store_latent import store_latent
from dsa_engine.kernels.rows.store_rows import store_rows
from dsa_engine.kernels.runtime.integers import cdiv
from kernel_cases.inputs import HIDDEN, INDEX_DIM, PAGE_SIZE, RANK, ROPE, TOPK, Inputs, KernelCase, Sizes

NOPE, EPS = 128, 1e-6


def norms(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        for width in (HIDDEN, 1536):
            x, weight = make.normal(tokens, width), make.normal(width)
            yield KernelCase("RMSNorm", f"{tokens} x {width}", partial(rms_norm, x, weight, EPS), bytes=2 * x.nbytes)
        x, residual, weight = make.normal(tokens, HIDDEN), make.normal(tokens, HIDDEN), make.normal(HIDDEN)
        words = make.zeros(tokens, quantized_words(HIDDEN) or 0, dtype=torch.int32)
        for name, coded in (("", ()), (", quantise 1 x 128", (words, True))):
            added = partial(add_rms_norm, x, residual, weight, EPS, None, *coded)
            moved = 4 * x.nbytes + (words.nbytes if coded else 0)
            yield KernelCase("add, RMSNorm" + name, f"{tokens} x {HIDDEN}", added, bytes=moved)


def prologs(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        cos, sin = make.floats(tokens, ROPE // 2), make.floats(tokens, ROPE // 2)
        turned = make.normal(tokens, 128, NOPE + ROPE)[..., NOPE:]
        out = make.normal(tokens, 128, RANK + ROPE)[..., RANK:]
        rope = partial(apply_rope, turned, cos, sin, interleaved=True, out=out)
        moved = 2 * turned.numel() * turned.element_size()
        yield KernelCase("RoPE of queries", f"{tokens} tokens, 128 heads", rope, bytes=moved)
        for dtype in (make.dtype, FP8):
            yield from _stores(make, tokens, dtype, cos, sin)
        positions, (tables, _) = make.selected(tokens, 131_072, TOPK), make.block_tables(1, 131_072)
        sequences = torch.zeros(tokens, dtype=torch.int32, device=make.device)
        slots = partial(slots_of, positions, tables, sequences, PAGE_SIZE)
        yield KernelCase("slots of positions", f"{tokens} x {TOPK}", slots, bytes=2 * positions.nbytes)
    latent = latent_format(RANK, ROPE, FP8)
    for tokens in (sizes.tokens, *sizes.contexts[-1:]):
        pages = cdiv(2 * tokens, PAGE_SIZE)
        chosen, pool = make.order(pages * PAGE_SIZE)[:tokens], make.pool(pages, latent)
        plain = make.pool(pages, latent_format(RANK, ROPE, make.dtype))
        yield KernelCase(
            "gather latent rows, FP8",
            f"{tokens} tokens",
            partial(gather_latent, pool, chosen, latent, make.dtype),
            bytes=tokens * (latent.columns + (RANK + ROPE) * make.dtype.itemsize),
            baselines={"torch index_select of plain rows": partial(gather_rows, plain, chosen)},
        )


def hot_rows(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """A step of requests whose pages are all spilled, with 2 · TOPK hot rows each, that finds what the one before has
    brought; and the copies of 1/16 of it."""
    context = min(sizes.contexts[-1], 32_768)
    k = min(TOPK, context)
    for batch in sizes.batches:
        pages, slots = batch * cdiv(context, PAGE_SIZE), make.selected(batch, context, k)
        slots += torch.arange(batch, dtype=torch.int32, device=make.device)[:, None] * context
        where = make.zeros(pages + 1, PAGE_SIZE, dtype=torch.int32) - 1
        row_of, stamp = (make.zeros(batch + 1, 2 * k, dtype=torch.int32) for _ in range(2))
        sets, of_set = torch.arange(batch).int().to(make.device), make.zeros(batch + 1, 4, dtype=torch.int64)
        resolve = partial(resolve_rows, slots, sets, where, row_of, stamp, of_set, 0)
        yield KernelCase("resolve rows", f"{batch} x {k} of {context:,}", resolve, bytes=3 * slots.nbytes)
        for dtype in (make.dtype, FP8):
            latent = latent_format(RANK, ROPE, dtype)
            host = latent.empty_pool(cdiv(context, PAGE_SIZE), PAGE_SIZE, torch.device("cpu"))
            host = host.pin_memory() if make.device.type == "cuda" else host
            rows, to = make.order(context)[:k].repeat(batch, 1), make.order(batch * k).view(batch, k)
            rows[:, k // 16 :] = -1
            fetch = partial(fetch_rows, make.pool(cdiv(batch * k, PAGE_SIZE), latent), host, rows, to)
            name, moved = "fetch rows" + (", FP8" if dtype == FP8 else ""), batch * (k // 16) * latent.row_bytes
            yield KernelCase(name, f"{batch} x {k // 16}, by PCIe", fetch, bytes=moved)


def _stores(
    make: Inputs, tokens: int, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor
) -> Iterator[KernelCase]:
    """Rows into a cache four times as large as the step; rows without index keys as in DeepSeek-V3, and in layers that
    reuse a selection."""
    latent, keys = latent_format(RANK, ROPE, dtype), index_key_format(INDEX_DIM, dtype, power_of_two=True)
    pages, name, shape = cdiv(4 * tokens, PAGE_SIZE), ", FP8" if dtype == FP8 else "", f"{tokens} tokens"
    pools, slots = (make.pool(pages, latent), make.pool(pages, keys)), make.order(pages * PAGE_SIZE)[:tokens]
    row_bytes = [pool.shape[-1] * pool.element_size() + 4 * ROPE for pool in pools]

    compressed, weight = make.normal(tokens, RANK + ROPE), make.normal(RANK)
    given = (compressed, weight, EPS, cos, sin, pools[0], slots)
    store = partial(store_latent, *given, row_format=latent, interleaved=True)
    yield KernelCase("store latent" + name, shape, store, bytes=compressed.nbytes + tokens * row_bytes[0])

    projected, norm = make.normal(tokens, INDEX_DIM), (make.floats(INDEX_DIM), make.floats(INDEX_DIM))
    yield KernelCase(
        "store index keys" + name,
        shape,
        partial(
            store_index_keys, projected, *norm, EPS, cos, sin, pools[1], slots, key_format=keys, interleaved=False,
        ),
        bytes=projected.nbytes + tokens * row_bytes[1],
        flops=2.0 * projected.numel() * INDEX_DIM if keys.coded else 0.0,  # the Hadamard transform
    )  # fmt: skip

    packed = CacheFormat.of(RANK, ROPE, INDEX_DIM, dtype).packed_width()
    rows = make.zeros(tokens, packed, dtype=pools[0].dtype)
    gathered = partial(store_cache_rows, *pools, rows, slots, keys)
    yield KernelCase("store gathered rows" + name, shape, gathered, bytes=2 * rows.nbytes)
    latents = make.zeros(tokens, latent.columns, dtype=pools[0].dtype)
    alone = partial(store_rows, pools[0], latents, slots)
    yield KernelCase("store gathered latent rows" + name, shape, alone, bytes=2 * latents.nbytes)


def quantise(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        x, shape = make.normal(tokens, HIDDEN), f"{tokens} x {HIDDEN}"
        moved = x.nbytes + x.numel()
        yield KernelCase("quantise 1 x 128", shape, partial(quantize_rows, x, 128, True), bytes=moved + x.numel() / 32)
        yield KernelCase("quantise rows to INT8", shape, partial(quantize_rows_int8, x), bytes=moved)
        q, weights = make.normal(tokens, 64, INDEX_DIM), make.floats(tokens, 64)
        cos, sin = make.floats(tokens, ROPE // 2), make.floats(tokens, ROPE // 2)
        quantize = partial(quantize_index_queries, key_format=index_key_format(INDEX_DIM, FP8, power_of_two=True))
        queries = partial(quantize, q, weights, cos, sin, interleaved=False)
        name, shape = "index queries: RoPE, Hadamard, quantise", f"{tokens} tokens, 64 heads"
        yield KernelCase(name, shape, queries, bytes=q.nbytes + q.numel(), flops=2.0 * q.numel() * INDEX_DIM)
    wide = make.normal(sizes.tokens, 18_432)
    codes, shape = partial(quantize_rows_int8, wide), f"{len(wide)} x 18432"
    yield KernelCase("quantise rows to INT8", shape, codes, bytes=wide.nbytes + wide.numel())
    weight, scales = make.fp8(4096, HIDDEN), make.floats(4096 // 128, HIDDEN // 128)
    numbers = partial(dequantize_blocks, weight, scales, (128, 128))
    yield KernelCase("dequantise 128 x 128", f"4096 x {HIDDEN}", numbers, bytes=5 * weight.numel())
