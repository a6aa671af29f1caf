"""Operations that work row by row: norms, rotation, cache writes, quantisation. All are bound by memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsa_engine.kernels.formats.cache_format import FP8, CacheFormat, IndexKeyFormat, LatentFormat
from dsa_engine.kernels.formats.fp8 import dequantize_blocks, dequantize_blocks_reference
from dsa_engine.kernels.formats.hadamard import hadamard, hadamard_reference
from dsa_engine.kernels.formats.quantize import quantize_rows, quantize_rows_reference
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries, quantize_index_queries_reference
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.rms_norm import rms_norm, rms_norm_reference
from dsa_engine.kernels.rows.rope import apply_rope, apply_rope_reference
from dsa_engine.kernels.rows.slots_of import slots_of
from dsa_engine.kernels.rows.store_cache_rows import store_cache_rows, store_cache_rows_reference
from dsa_engine.kernels.rows.store_index_keys import index_keys_reference, store_index_keys
from dsa_engine.kernels.rows.store_latent import latent_rows_reference, store_latent
from dsa_engine.kernels.rows.store_rows import store_rows
from dsa_engine.kernels.runtime.integers import cdiv
from kernel_cases.bench import Call, KernelCase
from kernel_cases.inputs import PAGE_SIZE, Inputs, Sizes

HIDDEN, RANK, ROPE, NOPE, INDEX_DIM, TOPK = 7168, 512, 64, 128, 128, 2048
EPS = 1e-6


def norms(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        for width in (HIDDEN, 1536):
            yield _norm(make, tokens, width)
        yield _add_norm(make, tokens)


def _norm(make: Inputs, tokens: int, width: int) -> KernelCase:
    x, weight = make.normal(tokens, width), make.normal(width)
    return KernelCase(
        "RMSNorm",
        shape=f"{tokens} x {width}",
        run=lambda: rms_norm(x, weight, EPS),
        flops=4.0 * x.numel(),
        bytes=2.0 * x.nbytes,
        baselines={"torch": lambda: rms_norm_reference(x, weight, EPS)},
    )


def _add_norm(make: Inputs, tokens: int) -> KernelCase:
    x, residual, weight = make.normal(tokens, HIDDEN), make.normal(tokens, HIDDEN), make.normal(HIDDEN)
    return KernelCase(
        "add, RMSNorm",
        shape=f"{tokens} x {HIDDEN}",
        run=lambda: add_rms_norm(x, residual, weight, EPS),
        flops=5.0 * x.numel(),
        bytes=4.0 * x.nbytes,
        baselines={"torch": lambda: rms_norm_reference(x + residual, weight, EPS)},
    )


def prologs(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        yield _rope(make, tokens)
        for quantised in (False, True):
            yield _latent(make, tokens, quantised)
            yield _index_keys(make, tokens, quantised)
        yield _gathered(make, tokens)
        yield _gathered_latents(make, tokens)
        yield _slots(make, tokens)


def _angles(make: Inputs, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(make.normal(tokens, ROPE // 2, dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def _destination(make: Inputs, tokens: int) -> tuple[int, torch.Tensor]:
    """Pages of a cache four times as large as the step, and a slot in it for every token."""
    pages = cdiv(4 * tokens, PAGE_SIZE)
    slots = torch.randperm(pages * PAGE_SIZE, device=make.device)[:tokens].int()
    return pages, slots


def _rope(make: Inputs, tokens: int) -> KernelCase:
    q, (cos, sin) = make.normal(tokens, 128, NOPE + ROPE), _angles(make, tokens)
    turned = q[..., NOPE:]
    out = make.normal(tokens, 128, RANK + ROPE)[..., RANK:]
    return KernelCase(
        "RoPE of queries",
        shape=f"{tokens} tokens, 128 heads",
        run=lambda: apply_rope(turned, cos, sin, interleaved=True, out=out),
        flops=3.0 * turned.numel(),
        bytes=2.0 * turned.numel() * turned.element_size(),
        baselines={"torch": lambda: out.copy_(apply_rope_reference(turned, cos, sin, True))},
    )


def _latent(make: Inputs, tokens: int, quantised: bool) -> KernelCase:
    compressed, weight, (cos, sin) = make.normal(tokens, RANK + ROPE), make.normal(RANK), _angles(make, tokens)
    pages, slots = _destination(make, tokens)
    pool = make.fp8_latent_pool(pages, RANK, ROPE) if quantised else make.pool(pages, RANK + ROPE)
    row_format = LatentFormat(RANK, ROPE, FP8 if quantised else make.dtype)
    baselines: dict[str, Call] = {}
    if not quantised:

        def separately() -> None:
            pool.view(-1, RANK + ROPE)[slots.long()] = latent_rows_reference(compressed, weight, EPS, cos, sin, True)

        baselines["torch norm, rope, scatter"] = separately
    return KernelCase(
        "store latent" + (", FP8" if quantised else ""),
        shape=f"{tokens} tokens",
        run=lambda: store_latent(
            compressed, weight, EPS, cos, sin, pool, slots, row_format=row_format, interleaved=True
        ),
        flops=0.0,
        bytes=float(compressed.nbytes + tokens * (pool.shape[-1] * pool.element_size() + 4 * ROPE)),
        baselines=baselines,
    )


def _index_keys(make: Inputs, tokens: int, quantised: bool) -> KernelCase:
    projected, (cos, sin) = make.normal(tokens, INDEX_DIM), _angles(make, tokens)
    weight, bias = (make.normal(INDEX_DIM, dtype=torch.float32) for _ in range(2))
    pages, slots = _destination(make, tokens)
    pool = make.fp8_index_pool(pages, INDEX_DIM) if quantised else make.pool(pages, INDEX_DIM)
    key_format = IndexKeyFormat(INDEX_DIM, FP8 if quantised else make.dtype)
    baselines: dict[str, Call] = {}
    if not quantised:

        def separately() -> None:
            keys = index_keys_reference(projected, weight, bias, EPS, cos, sin, False)
            pool.view(-1, INDEX_DIM)[slots.long()] = keys

        baselines["torch norm, rope, scatter"] = separately
    return KernelCase(
        "store index keys" + (", FP8" if quantised else ""),
        shape=f"{tokens} tokens",
        run=lambda: store_index_keys(
            projected,
            weight,
            bias,
            EPS,
            cos,
            sin,
            pool,
            slots,
            key_format=key_format,
            interleaved=False,
            power_of_two=quantised,
        ),
        flops=2.0 * projected.numel() * INDEX_DIM if quantised else 0.0,  # the Hadamard transform
        bytes=float(projected.nbytes + tokens * (pool.shape[-1] * pool.element_size() + 4 * ROPE)),
        baselines=baselines,
    )


def _gathered(make: Inputs, tokens: int) -> KernelCase:
    """Rows with index keys, as in DeepSeek-V3.2."""
    pages, slots = _destination(make, tokens)
    latents, keys = make.pool(pages, RANK + ROPE), make.pool(pages, INDEX_DIM)
    key_format = IndexKeyFormat(INDEX_DIM, make.dtype)
    rows = make.normal(tokens, CacheFormat.of(RANK, ROPE, INDEX_DIM, make.dtype).packed_width())
    return KernelCase(
        "store gathered rows",
        shape=f"{tokens} tokens",
        run=lambda: store_cache_rows(latents, keys, rows, slots, key_format),
        flops=0.0,
        bytes=2.0 * rows.nbytes,
        baselines={"torch index_put": lambda: store_cache_rows_reference(latents, keys, rows, slots, key_format)},
    )


def _gathered_latents(make: Inputs, tokens: int) -> KernelCase:
    """Rows without index keys, as in DeepSeek-V3 and in layers that reuse a selection."""
    pages, slots = _destination(make, tokens)
    pool, rows = make.pool(pages, RANK + ROPE), make.normal(tokens, RANK + ROPE)
    return KernelCase(
        "store gathered latent rows",
        shape=f"{tokens} tokens",
        run=lambda: store_rows(pool, rows, slots),
        flops=0.0,
        bytes=2.0 * rows.nbytes,
        baselines={"torch index_put": lambda: pool.view(-1, RANK + ROPE).index_copy_(0, slots.long(), rows)},
    )


def _slots(make: Inputs, tokens: int) -> KernelCase:
    context = 131_072
    positions, (tables, _) = make.selected(tokens, context, TOPK), make.block_tables(1, context)
    sequences = torch.zeros(tokens, dtype=torch.int32, device=make.device)
    return KernelCase(
        "slots of positions",
        shape=f"{tokens} x {TOPK}",
        run=lambda: slots_of(positions, tables, sequences, PAGE_SIZE),
        flops=0.0,
        bytes=2.0 * positions.nbytes,
        baselines={"torch": lambda: tables[0][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE},
    )


def fp8(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:2]):
        yield _quantise(make, tokens)
        yield _quantise_queries(make, tokens)
        yield _hadamard(make, tokens)
    yield _dequantise(make, 4096, HIDDEN)


def _quantise(make: Inputs, tokens: int) -> KernelCase:
    x = make.normal(tokens, HIDDEN)
    return KernelCase(
        "quantise 1 x 128",
        shape=f"{tokens} x {HIDDEN}",
        run=lambda: quantize_rows(x, 128, True),
        flops=0.0,
        bytes=float(x.nbytes + x.numel() * (1 + 4 / 128)),
        baselines={"torch": lambda: quantize_rows_reference(x, 128, True)},
    )


def _quantise_queries(make: Inputs, tokens: int) -> KernelCase:
    q, (cos, sin) = make.normal(tokens, 64, INDEX_DIM), _angles(make, tokens)
    weights = make.normal(tokens, 64, dtype=torch.float32)
    return KernelCase(
        "index queries: RoPE, Hadamard, quantise",
        shape=f"{tokens} tokens, 64 heads",
        run=lambda: quantize_index_queries(q, weights, cos, sin, interleaved=False, power_of_two=True),
        flops=2.0 * q.numel() * INDEX_DIM,  # the Hadamard transform
        bytes=float(q.nbytes + q.numel() + 2 * weights.nbytes),
        baselines={"torch": lambda: quantize_index_queries_reference(q, weights, cos, sin, False, True)},
    )


def _hadamard(make: Inputs, tokens: int) -> KernelCase:
    x = make.normal(tokens, 64, INDEX_DIM)
    return KernelCase(
        "Hadamard transform of 128",
        shape=f"{tokens} x 64 x {INDEX_DIM}",
        run=lambda: hadamard(x, INDEX_DIM**-0.5),
        flops=2.0 * x.numel() * INDEX_DIM,
        bytes=2.0 * x.nbytes,
        baselines={"torch": lambda: hadamard_reference(x, INDEX_DIM**-0.5)},
    )


def _dequantise(make: Inputs, rows: int, columns: int) -> KernelCase:
    weight = make.fp8(rows, columns)
    scales = make.normal(cdiv(rows, 128), cdiv(columns, 128), dtype=torch.float32)
    return KernelCase(
        "dequantise 128 x 128",
        shape=f"{rows} x {columns}",
        run=lambda: dequantize_blocks(weight, scales, (128, 128)),
        flops=0.0,
        bytes=float(weight.numel() * (1 + 4)),
        baselines={"torch": lambda: dequantize_blocks_reference(weight, scales, (128, 128))},
    )
