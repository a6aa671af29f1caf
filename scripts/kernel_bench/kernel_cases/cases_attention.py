"""Indexer and attention. DeepSeek-V3.2: 128 heads, latent 512 + 64, 64 index heads of 128, 2048 selected; GLM-5 has 64
heads and 32 index heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.attention.sparse_attention import sparse_attention, sparse_attention_reference
from dsa_engine.kernels.formats.cache_format import FP8, IndexKeyFormat, LatentFormat
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores, indexer_scores_reference
from dsa_engine.kernels.indexer.topk import select_topk
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.rows.slots_of import Paging
from dsa_engine.kernels.runtime.integers import cdiv
from kernel_cases.bench import Call, KernelCase
from kernel_cases.inputs import PAGE_SIZE, Inputs, Sizes
from kernel_cases.other_libraries import peer_indexer_scores, peer_sparse_attention

RANK, ROPE, INDEX_DIM, TOPK = 512, 64, 128, 2048
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
    weights = make.normal(n, heads, dtype=torch.float32)
    pairs = sum(s.visible_pairs for s in segments)

    def case(name: str, q: torch.Tensor, pool: torch.Tensor, baselines: Mapping[str, Call]) -> KernelCase:
        row_bytes = pool.shape[-1] * pool.element_size()
        return KernelCase(
            name,
            shape=f"{n} queries, {heads} heads, S {context:,}",
            run=lambda: indexer_scores(
                q, weights, pool, tables, segments, key_format=IndexKeyFormat(INDEX_DIM, q.dtype)
            ),
            flops=2.0 * pairs * heads * (INDEX_DIM + 1),
            bytes=float(4 * pairs + q.nbytes + sequences * context * row_bytes),
            baselines=baselines,
            product=product,
        )

    q, pool = make.normal(n, heads, INDEX_DIM), make.pool(pages, INDEX_DIM)

    def reference() -> object:
        return indexer_scores_reference(
            q, weights, pool, tables, segments, IndexKeyFormat(INDEX_DIM, q.dtype), WORKSPACE
        )

    yield case(kernel, q, pool, {"torch mm, relu, bmm": reference})
    q8 = make.fp8(n, heads, INDEX_DIM)
    peers = peer_indexer_scores(make, q8, weights, context) if product else {}
    yield case(f"{kernel}, FP8", q8, make.fp8_index_pool(pages, INDEX_DIM), peers)


def top_k(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for context in sizes.contexts:
        for rows in (*sizes.batches, sizes.scored):
            yield _top_k(make, rows, min(TOPK, context), context)


def _top_k(make: Inputs, rows: int, k: int, context: int) -> KernelCase:
    scores = make.normal(rows, context, dtype=torch.float32)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=make.device)
    tables, _ = make.block_tables(1, context)
    paging = Paging(tables, torch.zeros_like(lengths), PAGE_SIZE)
    return KernelCase(
        "top-k",
        shape=f"{rows} rows, k {k}, S {context:,}",
        run=lambda: select_topk(scores, k, lengths, paging=paging),
        flops=0.0,
        bytes=float(scores.nbytes + 4 * rows * k),
        baselines={"torch.topk": lambda: scores.topk(k, dim=-1, sorted=False)},
    )


def sparse_prefill(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for heads in (128, 64):
        for context in sizes.contexts:
            tokens = sizes.prefill
            pages = cdiv(context, PAGE_SIZE)
            q, slots = make.normal(tokens, heads, LATENT), make.selected(tokens, context, TOPK)
            pool = make.pool(pages, LATENT)
            yield _sparse("sparse attention, prefill", q, pool, slots, context, make, product=True)
            pool8 = make.fp8_latent_pool(pages, RANK, ROPE)
            yield _sparse("sparse attention, prefill, FP8 cache", q, pool8, slots, context, make, product=True)


def sparse_decode(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    context = sizes.contexts[-1]
    pages = cdiv(context, PAGE_SIZE)
    pool, pool8 = make.pool(pages, LATENT), make.fp8_latent_pool(pages, RANK, ROPE)
    for batch in sizes.batches:
        q, slots = make.normal(batch, 128, LATENT), make.selected(batch, context, TOPK)
        yield _sparse("sparse attention, decode", q, pool, slots, context, make)
        yield _sparse("sparse attention, decode, FP8 cache", q, pool8, slots, context, make)


def _sparse(
    kernel: str,
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    context: int,
    make: Inputs,
    *,
    product: bool = False,
) -> KernelCase:
    tokens, heads, _ = q.shape
    k = slots.shape[1]
    row_bytes = pool.shape[-1] * pool.element_size()
    row_format = LatentFormat(RANK, ROPE, FP8 if pool.dtype == torch.uint8 else pool.dtype)
    # Each row that some token selected is read once; with few tokens that is every selected row.
    rows = min(tokens * k, context)

    def reference() -> object:
        return sparse_attention_reference(q, pool, slots, None, row_format, SCALE, WORKSPACE)

    baselines = {"torch gather, bmm, softmax, bmm": reference}
    if product and not row_format.fp8:
        baselines |= peer_sparse_attention(q, pool, slots, RANK, SCALE)
        if context <= 8192:
            baselines["SDPA with a mask, 1/16 of the tokens, times 16"] = _masked_sdpa(q[: tokens // 16], pool, slots)
    return KernelCase(
        kernel,
        shape=f"{tokens} tokens, {heads} heads, k {k}, S {context:,}",
        run=lambda: sparse_attention(q, pool, slots, row_format=row_format, scale=SCALE, workspace=WORKSPACE),
        flops=2.0 * tokens * heads * k * (LATENT + RANK),
        bytes=float(q.nbytes * (1 + RANK / LATENT) + rows * row_bytes + slots.nbytes),
        baselines=baselines,
        product=product,
    )


def dense_decode(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for context in (min(TOPK, sizes.contexts[0]), *sizes.contexts[1:]):
        for batch in sizes.batches:
            if batch * context <= sizes.max_cached:
                yield _dense(make, batch, context, quantised=False)
                yield _dense(make, batch, context, quantised=True)


def _dense(make: Inputs, batch: int, context: int, *, quantised: bool) -> KernelCase:
    segments, (tables, pages) = make.decode(batch, context), make.block_tables(batch, context)
    q = make.normal(batch, 128, LATENT)
    pool = make.fp8_latent_pool(pages, RANK, ROPE) if quantised else make.pool(pages, LATENT)
    row_format = LatentFormat(RANK, ROPE, FP8 if quantised else make.dtype)
    return KernelCase(
        "dense MLA, decode, FP8 cache" if quantised else "dense MLA, decode",
        shape=f"batch {batch}, 128 heads, S {context:,}",
        run=lambda: dense_mla(q, pool, tables, segments, row_format=row_format, scale=SCALE, workspace=WORKSPACE),
        flops=2.0 * batch * 128 * context * (LATENT + RANK),
        bytes=float(q.nbytes * (1 + RANK / LATENT) + pool.nbytes),
        baselines={} if quantised else {"SDPA over the gathered cache": _sdpa_decode(q, pool, tables, context)},
    )


def _sdpa_decode(q: torch.Tensor, pool: torch.Tensor, tables: torch.Tensor, context: int) -> Callable[[], object]:
    def run() -> object:
        rows = pool[tables.long()].flatten(1, 2)[:, None, :context]  # [batch, 1, S, 576]: one key head for all
        return F.scaled_dot_product_attention(q[:, :, None], rows, rows[..., :RANK], scale=SCALE, enable_gqa=True)

    return run


def _masked_sdpa(q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> Callable[[], object]:
    """Dense attention with a mask for tokens that are not selected, for as many queries as fit beside its S² scores;
    16 calls compute all tokens."""

    def run() -> None:
        rows = pool.flatten(0, 1)
        mask = torch.zeros(q.shape[0], rows.shape[0], dtype=torch.bool, device=q.device)
        mask.scatter_(1, slots[: q.shape[0]].long(), True)
        keys = rows.expand(1, q.shape[1], -1, -1)
        for _ in range(16):
            F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, keys[..., :RANK], attn_mask=mask[None, None], scale=SCALE
            )

    return run
