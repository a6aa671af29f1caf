"""Indexer and attention. DeepSeek-V3.2: 128 heads, latent 512 + 64, 64 index heads of 128, 2048 selected; GLM-5 has 64
heads and 32 index heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.attention.expand_latents import expand_latents
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format, latent_format
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.indexer.nth_largest import nth_largest
from dsa_engine.kernels.indexer.slots_above import slots_above
from dsa_engine.kernels.indexer.topk import select_topk
from dsa_engine.kernels.libraries import gluon
from dsa_engine.kernels.rows.segment import Paging, Segments
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.libraries import ADAPTERS
from kernel_cases.inputs import INDEX_DIM, PAGE_SIZE, RANK, ROPE, TOPK, Call, Inputs, KernelCase, Sizes, referenced

LATENT = RANK + ROPE
SCALE = (128 + 64) ** -0.5
WORKSPACE = 1 << 30


def indexer_prefill(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for heads in (64, 32):
        for context in sizes.contexts:
            segments = make.prefill(min(sizes.scored, context), context)
            yield from _scores("indexer scores, prefill", make, heads, segments, 1, context, product=True)


def indexer_decode(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for context in sizes.contexts:
        for batch in sizes.batches:
            if batch * context <= sizes.max_cached:
                segments = make.decode(batch, context)
                yield from _scores("indexer scores, decode", make, 64, segments, batch, context)


def _scores(
    kernel: str, make: Inputs, heads: int, segments: Segments, sequences: int, context: int, *, product: bool = False
) -> Iterator[KernelCase]:
    """Scores in the run's dtype and in FP8; keys are read once per sequence, scores written once."""
    n = segments.rows
    tables, pages = make.block_tables(sequences, context)
    weights = make.floats(n, heads)
    pairs = sum(s.visible_pairs for s in segments)
    for name, dtype in (("", make.dtype), (", FP8", FP8)):
        q = make.fp8(n, heads, INDEX_DIM) if dtype == FP8 else make.normal(n, heads, INDEX_DIM)
        key_format = index_key_format(INDEX_DIM, dtype)
        pool = make.pool(pages, key_format)
        yield KernelCase(
            kernel + name,
            f"{n} queries, {heads} heads, S {context:,}",
            partial(indexer_scores, q, weights, pool, tables, segments, key_format=key_format),
            bytes=4 * pairs + q.nbytes + sequences * context * pool.shape[-1] * pool.element_size(),
            flops=2.0 * pairs * heads * (INDEX_DIM + 1),
            baselines=_deep_gemm(make, q, weights, context) if product and dtype == FP8 else {},
            product=product,
        )


def _deep_gemm(make: Inputs, q: torch.Tensor, weights: torch.Tensor, context: int) -> dict[str, Call]:
    """DeepGEMM's FP8 scores of a prefill, over contiguous keys, where it is installed."""
    if not find_spec("deep_gemm"):
        return {}
    deep_gemm = import_module("deep_gemm")
    keys, scales, count = make.fp8(context, q.shape[-1]), torch.ones(context, device=q.device), q.shape[0]
    begin = torch.zeros(count, dtype=torch.int32, device=q.device)
    end = torch.arange(context - count + 1, context + 1, dtype=torch.int32, device=q.device)
    return {"DeepGEMM": lambda: deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, begin, end)}


def top_k(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for context in sizes.contexts:
        for rows in (1, 4, 8, 64, sizes.scored):
            k = min(TOPK, context)
            scores, (tables, _) = make.floats(rows, context), make.block_tables(1, context)
            lengths = torch.full((rows,), context, dtype=torch.int32, device=make.device)
            finished = torch.zeros_like(lengths)
            paging = Paging(tables, torch.zeros_like(lengths), PAGE_SIZE)
            shape, moved = f"{rows} rows, k {k}, S {context:,}", scores.nbytes + 4 * rows * k
            run = partial(select_topk, scores, k, lengths, paging=paging, finished=finished)
            others = {"torch.topk": partial(scores.topk, k, dim=-1, sorted=False)}
            yield KernelCase("top-k", shape, run, bytes=moved, baselines=others)


def candidates(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """Of requests whose pages lie on 8 ranks: what a rank selects among 131,072 tokens of its own, and the exchange."""
    context = sizes.contexts[-1]
    tables, _ = make.block_tables(1, context)
    for rows in (8, 64):
        k, lengths = min(TOPK, context), torch.full((rows,), context, dtype=torch.int32, device=make.device)
        paging, keys = Paging(tables, torch.zeros_like(lengths), PAGE_SIZE), make.zeros(rows, k, dtype=torch.int64)
        scores, shape = make.floats(rows, context), f"{rows} rows, k {k}, S {context:,}"
        how = {"page_index": tables, "keys": keys, "finished": torch.zeros_like(lengths)}
        run = partial(select_topk, scores, k, lengths, paging=paging, **how)
        yield KernelCase("top-k, candidates", shape, run, bytes=scores.nbytes + 12 * rows * k)
        gathered = make.order(8 * rows * k).long().view(8, rows, k)
        flat = gathered.transpose(0, 1).reshape(rows, -1)
        others = {"torch.topk": lambda flat=flat, k=k: flat.topk(k, dim=-1).values[:, -1]}
        threshold = partial(nth_largest, gathered, k)
        yield KernelCase(
            "threshold of candidates", f"{rows} x 8 x {k}", threshold, bytes=8 * flat.numel(), baselines=others
        )
        slots, thresholds = make.order(rows * k).view(rows, k), torch.zeros_like(lengths, dtype=torch.int64)
        selected = partial(slots_above, gathered[0], slots, thresholds)
        yield KernelCase("selected candidates", f"{rows} x {k}", selected, bytes=16 * rows * k)


def sparse_prefill(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for heads in (128, 64):
        for context in sizes.contexts:
            for dtype in (make.dtype, FP8):
                q, slots = make.normal(sizes.prefill, heads, LATENT), make.selected(sizes.prefill, context, TOPK)
                case = _sparse("sparse attention, prefill", make, q, slots, context, dtype, product=True)
                yield case
                yield from _in_gluon(case, case.run)
                if heads == 128 and dtype == FP8:
                    yield _expansion(make, slots, context)


def _expansion(make: Inputs, slots: torch.Tensor, context: int) -> KernelCase:
    """What comes before attention to plain rows where the cache is FP8: once a layer of a prefill."""
    row_format, pages = latent_format(RANK, ROPE, FP8), make.order(cdiv(context, PAGE_SIZE))
    given = make.pool(len(pages), row_format), slots, pages, pages.argsort().int(), row_format, make.dtype
    moved = context * (row_format.columns + LATENT * make.dtype.itemsize) + 2 * slots.nbytes
    return KernelCase("FP8 rows expanded", f"S {context:,}", partial(expand_latents, *given), bytes=moved)


def _in_gluon(case: KernelCase, triton: Any) -> Iterator[KernelCase]:
    """The case of our kernel in Gluon, beside Triton's, if it takes the call."""
    if runs_triton(triton.args[0]) and ADAPTERS[gluon.NAME].takes(*triton.args, **triton.keywords):
        launched: Any = gluon.sparse_prefill_sm90.sparse_prefill
        run = partial(launched, *triton.args, triton.keywords["scale"])
        others = {"reference": referenced(triton), "Triton": triton}
        yield replace(case, kernel=f"{case.kernel}, Gluon", run=run, baselines=others)


def sparse_decode(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    context = sizes.contexts[-1]
    for batch in sizes.batches:
        for dtype in (make.dtype, FP8):
            q, slots = make.normal(batch, 128, LATENT), make.selected(batch, context, TOPK)
            yield _sparse("sparse attention, decode", make, q, slots, context, dtype)


def _sparse(
    kernel: str, make: Inputs, q: torch.Tensor, slots: torch.Tensor, context: int, dtype: torch.dtype, *,
    product: bool = False,
) -> KernelCase:  # fmt: skip
    row_format = latent_format(RANK, ROPE, dtype)
    pool = make.pool(cdiv(context, PAGE_SIZE), row_format)
    (tokens, heads, _), k = q.shape, slots.shape[1]
    # Each row that some token selected is read once; with few tokens that is every selected row.
    rows = min(tokens * k, context)
    return KernelCase(
        kernel + (", FP8 cache" if row_format.coded else ""),
        f"{tokens} tokens, {heads} heads, k {k}, S {context:,}",
        partial(sparse_attention, q, pool, slots, row_format=row_format, scale=SCALE, workspace=WORKSPACE),
        bytes=q.nbytes * (1 + RANK / LATENT) + rows * pool.shape[-1] * pool.element_size() + slots.nbytes,
        flops=2.0 * tokens * heads * k * (LATENT + RANK),
        baselines=_flash_mla(q, pool, slots) if product and not row_format.coded else {},
        product=product,
    )


def _flash_mla(q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> dict[str, Call]:
    """FlashMLA's sparse prefill over the same rows, where it is installed."""
    if not find_spec("flash_mla"):
        return {}
    sparse, rows = import_module("flash_mla").flash_mla_sparse_fwd, pool.flatten(0, 1)
    return {"FlashMLA": lambda: sparse(q, rows[:, None], slots[:, None], SCALE, RANK)}


def dense_decode(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for context in (min(TOPK, sizes.contexts[0]), *sizes.contexts[1:]):
        for batch in sizes.batches:
            for dtype in (make.dtype, FP8):
                if batch * context <= sizes.max_cached:
                    yield _dense(make, batch, context, latent_format(RANK, ROPE, dtype))


def _dense(make: Inputs, batch: int, context: int, row_format: LatentFormat) -> KernelCase:
    segments, (tables, pages) = make.decode(batch, context), make.block_tables(batch, context)
    q, pool = make.normal(batch, 128, LATENT), make.pool(pages, row_format)

    def sdpa() -> object:
        rows = pool[tables.long()].flatten(1, 2)[:, None, :context]  # [batch, 1, S, 576]: one key head for all
        return F.scaled_dot_product_attention(q[:, :, None], rows, rows[..., :RANK], scale=SCALE, enable_gqa=True)

    return KernelCase(
        "dense MLA, decode" + (", FP8 cache" if row_format.coded else ""),
        f"batch {batch}, 128 heads, S {context:,}",
        partial(dense_mla, q, pool, tables, segments, row_format=row_format, scale=SCALE, workspace=WORKSPACE),
        bytes=q.nbytes * (1 + RANK / LATENT) + pool.nbytes,
        flops=2.0 * batch * 128 * context * (LATENT + RANK),
        baselines={} if row_format.coded else {"SDPA over the gathered cache": sdpa},
    )
