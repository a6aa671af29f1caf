"""Moves of FP8 cache rows, beside the same in bfloat16: 656 + 132 bytes per token of DeepSeek-V3.2 against 1,408.
The other files have the cases that write such rows and attend to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsa_engine.kernels.attention.gather_latent import gather_latent
from dsa_engine.kernels.formats.cache_format import FP8, CacheFormat, IndexKeyFormat, LatentFormat
from dsa_engine.kernels.rows.paged import gather_rows
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows
from dsa_engine.kernels.rows.store_rows import store_rows
from dsa_engine.kernels.runtime.integers import cdiv
from kernel_cases.bench import KernelCase
from kernel_cases.inputs import PAGE_SIZE, Inputs, Sizes

RANK, ROPE, INDEX_DIM = 512, 64, 128


def fp8_cache(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.contexts[-1:]):
        yield _gather(make, tokens)
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        yield _store_gathered(make, tokens)
        yield _store_gathered_latents(make, tokens)


def _pages_and_slots(make: Inputs, tokens: int) -> tuple[int, torch.Tensor]:
    """Pages of a cache twice as large as the step, and a slot in it for every token, in random order."""
    pages = cdiv(2 * tokens, PAGE_SIZE)
    return pages, torch.randperm(pages * PAGE_SIZE, device=make.device)[:tokens].int()


def _gather(make: Inputs, tokens: int) -> KernelCase:
    pages, slots = _pages_and_slots(make, tokens)
    pool, plain = make.fp8_latent_pool(pages, RANK, ROPE), make.pool(pages, RANK + ROPE)
    return KernelCase(
        "gather latent rows, FP8",
        shape=f"{tokens} tokens",
        run=lambda: gather_latent(pool, slots, LatentFormat(RANK, ROPE, FP8), make.dtype),
        flops=0.0,
        bytes=float(tokens * (pool.shape[-1] + (RANK + ROPE) * make.dtype.itemsize)),
        baselines={"torch index_select of plain rows": lambda: gather_rows(plain, slots)},
    )


def _store_gathered(make: Inputs, tokens: int) -> KernelCase:
    pages, slots = _pages_and_slots(make, tokens)
    fp8, plain = (CacheFormat.of(RANK, ROPE, INDEX_DIM, dtype) for dtype in (FP8, make.dtype))
    pools = make.fp8_latent_pool(pages, RANK, ROPE), make.fp8_index_pool(pages, INDEX_DIM)
    rows = torch.empty(tokens, fp8.packed_width(), dtype=torch.uint8, device=make.device)
    plain_pools = make.pool(pages, RANK + ROPE), make.pool(pages, INDEX_DIM)
    plain_rows = make.normal(tokens, plain.packed_width())
    return KernelCase(
        "store gathered rows, FP8",
        shape=f"{tokens} tokens",
        run=lambda: store_cache_rows(*pools, rows, slots, IndexKeyFormat(INDEX_DIM, FP8)),
        flops=0.0,
        bytes=2.0 * rows.nbytes,
        baselines={
            "plain rows": lambda: store_cache_rows(
                *plain_pools, plain_rows, slots, IndexKeyFormat(INDEX_DIM, make.dtype)
            )
        },
    )


def _store_gathered_latents(make: Inputs, tokens: int) -> KernelCase:
    """Rows without index keys, as in DeepSeek-V3 and in layers that reuse a selection."""
    pages, slots = _pages_and_slots(make, tokens)
    latent = LatentFormat(RANK, ROPE, FP8)
    pool, plain = make.fp8_latent_pool(pages, RANK, ROPE), make.pool(pages, RANK + ROPE)
    rows = torch.empty(tokens, latent.columns, dtype=torch.uint8, device=make.device)
    plain_rows = make.normal(tokens, RANK + ROPE)
    return KernelCase(
        "store gathered latent rows, FP8",
        shape=f"{tokens} tokens",
        run=lambda: store_rows(pool, rows, slots),
        flops=0.0,
        bytes=2.0 * rows.nbytes,
        baselines={"plain rows": lambda: store_rows(plain, plain_rows, slots)},
    )
