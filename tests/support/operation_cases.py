"""Small calls of every operation of the kernels, for tests of all of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch

import dsa_engine.kernels
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format, latent_format
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.formats.int4 import arrange_int4_, planes_for, quantize_int4
from dsa_engine.kernels.formats.quantize import quantize_tokens
from dsa_engine.kernels.formats.row_format import IndexKeyFormat, LatentFormat
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A16
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.rows.segment import CuSeqlens, Segment, Segments

for _module in pkgutil.walk_packages(dsa_engine.kernels.__path__, "dsa_engine.kernels."):  # all of OPERATIONS
    if "native" not in _module.name:
        importlib.import_module(_module.name)

T, HIDDEN, HEADS, EXPERTS, TOP_K, PAGE = 60, 128, 2, 8, 4, 16
BF16 = torch.bfloat16
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Make:
    """Random tensors, the same each time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def floats(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape, dtype=torch.float32)

    def whole(self, end: int, *shape: int) -> torch.Tensor:
        return torch.randint(end, shape, generator=self._generator, dtype=torch.int32)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator).int()

    def angles(self, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = self.floats(T, half)
        return angle.cos(), angle.sin()

    def experts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_ids, topk_weights."""
        return self.normal(T, HIDDEN), self.whole(EXPERTS, T, TOP_K), self.floats(T, TOP_K).abs()

    def blocks(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = quantize_blocks(self.floats(shape[0] * shape[1], shape[2]), (128, 128))
        return codes.view(shape), scales.view(shape[0], -1, scales.shape[1])

    def int8(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.whole(255, *shape) - 127).to(torch.int8), self.floats(*shape[:-1]).abs() / 100

    def int4(self, *shape: int, int8_activations: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scale = quantize_int4(self.floats(torch.Size(shape[:-1]).numel(), shape[-1]))
        arrange_int4_(packed, planes_for(int8_activations))
        return packed.view(*shape[:-1], -1), scale.view(*shape[:-1], -1)

    def paged(self, row_format: LatentFormat | IndexKeyFormat) -> tuple[torch.Tensor, torch.Tensor, Segments]:
        """A pool, the block table and the segments of a prefill of T tokens."""
        pages = -(-T // PAGE)
        pool = row_format.random_pages(pages, PAGE, self._generator)
        return pool, self.order(pages).view(1, pages), Segments.of([Segment(0, T, 0, 0)], "cpu")


def _pool(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool, of which the rows that are written are a small part, with numbers beyond all others in the rest."""
    return torch.full((40, PAGE, columns), 250 if dtype == torch.uint8 else 1e6, dtype=dtype)


def _slots(make: Make) -> torch.Tensor:
    return make.order(40 * PAGE)[:T]


def _store_latent(make: Make, dtype: torch.dtype) -> Call:
    kind = latent_format(128, 16, dtype)
    weight, out = make.normal(128), _pool(kind.columns, kind.pool_dtype)
    given = (make.normal(T, 144), weight, 1e-6, *make.angles(8), out, _slots(make))
    return given, {"row_format": kind, "interleaved": True}


def _store_keys(make: Make, dtype: torch.dtype) -> Call:
    kind = index_key_format(32, dtype)
    norm, out = (make.floats(32), make.floats(32)), _pool(kind.columns, kind.pool_dtype)
    given = (make.normal(T, 32), *norm, 1e-6, *make.angles(8), out, _slots(make))
    return given, {"key_format": kind, "interleaved": False}


def _store_cache_rows(make: Make) -> Call:
    latent, keys = _pool(144, BF16), _pool(32, BF16)
    return (latent, keys, make.normal(T, 176), _slots(make), index_key_format(32, BF16)), {}


def _route(make: Make) -> Call:
    how = {"top_k": TOP_K, "groups": 4, "top_groups": 2, "normalise": True, "factor": 2.5}
    return (make.floats(T, EXPERTS), make.floats(EXPERTS)), how


def _scores(make: Make) -> Call:
    kind = index_key_format(32, BF16)
    pool, tables, segments = make.paged(kind)
    return (make.normal(T, 8, 32), make.floats(T, 8), pool, tables, segments), {"key_format": kind}


def _indexer(make: Make) -> Call:
    (q, weights, pool, tables, segments), how = _scores(make)
    return (q, weights, pool, tables, segments, 16), how


def _candidates(make: Make) -> Call:
    (q, weights, pool, tables, segments, k), how = _indexer(make)
    keys = torch.zeros(T, k, dtype=torch.int64)
    return (q, weights, pool, tables, segments, k), {**how, "page_index": 2 * torch.sort(tables).values, "keys": keys}


def _dense(make: Make) -> Call:
    kind = latent_format(128, 16, BF16)
    pool, tables, segments = make.paged(kind)
    return (make.normal(T, HEADS, 144), pool, tables, segments), {"row_format": kind, "scale": 0.1}


def _sparse(make: Make, dtype: torch.dtype) -> Call:
    kind = latent_format(128, 16, dtype)
    pool, _, _ = make.paged(kind)
    slots = torch.stack([make.order(T)[:16] for _ in range(T)])
    return (make.normal(T, HEADS, 144), pool, slots), {"row_format": kind, "scale": 0.1}


def _two_replicas() -> torch.Tensor:
    return torch.tensor([[2, 1 + expert, 1 + expert + EXPERTS] for expert in range(EXPERTS)], dtype=torch.int32)


def _block_experts(make: Make) -> Call:
    gate_up, gate_up_scale = make.blocks(2 * EXPERTS, 128, HIDDEN)
    stacked = gate_up.view(EXPERTS, 2, 128, HIDDEN), gate_up_scale.view(EXPERTS, 2, 1, 1)
    return (*make.experts(), stacked, make.blocks(EXPERTS, HIDDEN, 128), block_fp8(False, HIDDEN)), {}


def _resolve_rows(make: Make) -> Call:
    """8 resident and 8 spilled slots of each of T requests, none of these twice; 24 hot rows a request, some taken."""
    where, row_of = torch.full((41, PAGE), -1).int(), torch.full((T + 1, 24), -1).int()
    where.view(-1)[:48] = row_of.view(-1)[:48] = torch.arange(48)
    slots = torch.cat((make.whole(64, T, 8), 64 + make.order(40 * PAGE)[: T * 8].view(T, 8)), dim=1)
    return (slots, make.order(T), where, row_of, torch.zeros_like(row_of), make.whole(24, T + 1, 4).long(), 64), {}


CASES: dict[str, Callable[[Make], Call]] = {
    "add_rms_norm": lambda m: ((m.normal(T, HIDDEN), m.normal(T, HIDDEN), m.normal(HIDDEN), 1e-6), {}),
    "apply_rope": lambda m: ((m.normal(T, HEADS, 16), *m.angles(8)), {"interleaved": True}),
    "block_scaled_linear": lambda m: ((m.normal(T, HIDDEN), *(x.squeeze(0) for x in m.blocks(1, 256, HIDDEN))), {}),
    "combine": lambda m: ((m.normal(T * 4, HIDDEN), m.order(T * 4).view(T, 4), m.floats(T, 4)), {}),
    "combine_codes": lambda m: (
        (quantize_tokens(m.normal(T * 4, HIDDEN), True), m.order(T * 4).view(T, 4), HIDDEN, BF16), {},
    ),
    "choose_replicas": lambda m: ((m.whole(EXPERTS, T, TOP_K), _two_replicas(), 3), {}),
    "dense_attention": lambda m: (
        (m.normal(T, HEADS, 24), m.normal(T, HEADS, 24), m.normal(T, HEADS, 16), *2 * (CuSeqlens.of([20, T - 20]),)),
        {"scale": 0.2},
    ),
    "dense_mla": _dense,
    "dequantize_blocks": lambda m: ((*(x.squeeze(0) for x in m.blocks(1, 256, 256)), (128, 128)), {"dtype": BF16}),
    "expert_mlp": lambda m: ((*m.experts(), (m.normal(EXPERTS, 128, HIDDEN),), (m.normal(EXPERTS, HIDDEN, 64),)), {}),
    "expert_mlp, FP8": _block_experts,
    "expert_mlp, INT4": lambda m: (
        (*m.experts(), (*m.int4(EXPERTS, 256, HIDDEN), None), (*m.int4(EXPERTS, HIDDEN, 128), None), W4A16), {},
    ),
    "expert_mlp, INT8": lambda m: ((*m.experts(), m.int8(EXPERTS, 128, HIDDEN), m.int8(EXPERTS, HIDDEN, 64), INT8), {}),
    "expand_latents": lambda m: (
        (m.paged(latent_format(128, 16, FP8))[0], m.whole(T, T, TOP_K), (order := m.order(4)), order.argsort().int(),
         latent_format(128, 16, FP8), BF16), {},
    ),
    "expert_order": lambda m: ((m.whole(EXPERTS, T, TOP_K), EXPERTS), {}),
    "fetch_rows": lambda m: (
        (_pool(32, BF16), m.normal(20, PAGE, 32), m.order(20 * PAGE)[:T, None], _slots(m)[:, None]), {},
    ),
    "gather_latent": lambda m: (
        (m.paged(latent_format(128, 16, FP8))[0], m.order(T), latent_format(128, 16, FP8), BF16), {},
    ),
    "indexer_scores": _scores,
    "lightning_indexer": _indexer,
    "lightning_indexer, candidates": _candidates,
    "linear": lambda m: ((m.normal(T, HIDDEN), m.normal(64, HIDDEN)), {}),
    "merge_splits": lambda m: ((m.floats(3, T, HEADS, 64), m.floats(3, T, HEADS)), {}),
    "nth_largest": lambda m: ((m.order(4 * T * 8).view(4, T, 8).long(), 16), {}),
    "pack_tokens": lambda m: (m.experts(), {}),
    "per_head_matmul": lambda m: ((m.normal(T, HEADS, 16), m.normal(HEADS, 16, 32), m.normal(T, HEADS, 32)), {}),
    "quantize_index_queries": lambda m: (
        (m.normal(T, HEADS, 32), m.floats(T, HEADS), *m.angles(8)),
        {"key_format": index_key_format(32, FP8), "interleaved": False},
    ),
    "quantize_rows": lambda m: ((m.normal(T, 256),), {}),
    "quantize_rows_int8": lambda m: ((m.normal(T, HIDDEN),), {}),
    "quantized_linear, INT4": lambda m: ((m.normal(T, HIDDEN), (*m.int4(64, HIDDEN), None), W4A16), {}),
    "quantized_linear, INT8": lambda m: ((m.normal(T, HIDDEN), m.int8(64, HIDDEN), INT8), {}),
    "resolve_rows": _resolve_rows,
    "rms_norm": lambda m: ((m.normal(T, HIDDEN), m.normal(HIDDEN), 1e-6), {}),
    "route": _route,
    "select_topk": lambda m: ((m.floats(T, 64), 16), {}),
    "silu_mul": lambda m: ((m.normal(T, HIDDEN),), {}),
    "slots_above": lambda m: (
        (m.order(T * 8).view(T, 8).long(), m.order(T * 8).view(T, 8), m.whole(T * 8, T).long()), {},
    ),
    "slots_of": lambda m: ((m.whole(64, T, 8), m.order(16).view(4, 4), m.whole(4, T), PAGE), {}),
    "sparse_attention": lambda m: _sparse(m, BF16),
    "sparse_attention, FP8": lambda m: _sparse(m, FP8),
    "store_cache_rows": _store_cache_rows,
    "store_index_keys": lambda m: _store_keys(m, BF16),
    "store_index_keys, FP8": lambda m: _store_keys(m, FP8),
    "store_latent": lambda m: _store_latent(m, BF16),
    "store_latent, FP8": lambda m: _store_latent(m, FP8),
    "store_rows": lambda m: ((_pool(32, BF16), m.normal(T, 32), _slots(m)), {}),
    "token_ranks": lambda m: ((m.whole(EXPERTS, T, TOP_K), (torch.arange(EXPERTS) // 4).int(), 4), {}),
}  # fmt: skip
