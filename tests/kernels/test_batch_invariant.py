"""Under ``launch.batch_invariance`` a row's result is the same bits whatever rows are beside it, and on a device of
however many multiprocessors: the C++ kernels on a CPU, the Triton kernels in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format, latent_format
from dsa_engine.kernels.grouped.grouped_matmul import PLAIN
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8, W4A16
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_linear
from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.linear.per_head_matmul import per_head_matmul
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.moe.router import route
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.kernels.rows.store_latent import store_latent
from dsa_engine.kernels.runtime import cpu, launch, operation
from dsa_engine.kernels.runtime.launch import INTERPRETED
from operation_cases import EXPERTS, HEADS, HIDDEN, TOP_K, Make, T

Rows = Callable[[slice], Sequence[torch.Tensor]]  # the results of some rows
CUTS = (0, 1, 3, 20, T)


class Given:
    """Random tensors of a dtype on a device, and the operations on some of T rows of them."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype, self.make = device, dtype, Make()

    def x(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.make.normal(*shape, dtype=dtype or self.dtype).to(self.device)

    def on(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in tensors)

    def segments(self, rows: slice) -> Segments:
        return Segments.of([Segment(0, rows.stop - rows.start, 0, rows.start)], self.device)

    def linear(self) -> Rows:
        x, weight = self.x(T, HIDDEN), self.x(51, HIDDEN)
        wide = INTERPRETED or self.device == "cuda"
        return lambda rows: [linear(x[rows], weight), *([linear(x[rows], weight, torch.float32)] if wide else [])]

    def per_head_matmul(self) -> Rows:
        x, up, down = self.x(T, HEADS, 48), self.x(HEADS, 48, 32), self.x(HEADS, 40, 48)

        def run(rows: slice) -> list[torch.Tensor]:
            outs = [x.new_empty(rows.stop - rows.start, HEADS, width) for width in (32, 40)]
            per_head_matmul(x[rows], up, outs[0])
            per_head_matmul(x[rows], down.transpose(1, 2), outs[1])
            return outs

        return run

    def quantized_linear(self) -> Rows:
        x, int8, int4 = self.x(T, HIDDEN), self.on(*self.make.int8(96, HIDDEN)), self.on(*self.make.int4(96, HIDDEN))
        return lambda rows: [
            quantized_linear(x[rows], int8, INT8), quantized_linear(x[rows], (*int4, None), W4A16)
        ]  # fmt: skip

    def block_scaled_linear(self) -> Rows:
        x, weight = self.x(T, 3 * HIDDEN), self.on(*(w.squeeze(0) for w in self.make.blocks(1, 256, 3 * HIDDEN)))
        return lambda rows: [block_scaled_linear(x[rows], *weight)]

    def expert_mlp(self) -> Rows:
        make, (x, ids, weights) = self.make, self.make.experts()
        x, ids, weights = self.on(x.to(self.dtype), ids, weights)
        codes, scales = make.blocks(2 * EXPERTS, 128, HIDDEN)
        stacked = self.on(codes.view(EXPERTS, 2, 128, HIDDEN), scales.view(EXPERTS, 2, 1, 1))
        kinds = [
            ((self.x(EXPERTS, 256, HIDDEN),), (self.x(EXPERTS, HIDDEN, 128),), PLAIN),
            (stacked, self.on(*make.blocks(EXPERTS, HIDDEN, 128)), block_fp8(False, HIDDEN)),
            (self.on(*make.int8(EXPERTS, 256, HIDDEN)), self.on(*make.int8(EXPERTS, HIDDEN, 128)), INT8),
        ]
        for int8_activations, kind in ((False, W4A16), (True, W4A8)):
            shapes = (EXPERTS, 256, HIDDEN), (EXPERTS, HIDDEN, 128)
            parts = ((*self.on(*make.int4(*shape, int8_activations=int8_activations)), None) for shape in shapes)
            kinds.append((*parts, kind))
        return lambda rows: [expert_mlp(x[rows], ids[rows], weights[rows], *kind) for kind in kinds]

    def route(self) -> Rows:
        logits, bias = self.on(self.make.floats(T, 16), self.make.floats(16))
        how = {"top_k": TOP_K, "groups": 4, "top_groups": 2, "normalise": True, "factor": 2.5}
        return lambda rows: route(logits[rows], bias, **how)

    def index(self, dtype: torch.dtype) -> Rows:
        kind = index_key_format(32, dtype)
        pool, tables, _ = self.make.paged(kind)
        pool, tables = self.on(pool, tables)
        q, weights = self.x(T, 12, 32, dtype=torch.float32).to(dtype), self.x(T, 12, dtype=torch.float32)

        def run(rows: slice) -> list[torch.Tensor]:
            given = (q[rows], weights[rows], pool, tables, self.segments(rows))
            selected = lightning_indexer(*given, 16, key_format=kind)
            if not (INTERPRETED or self.device == "cuda"):  # a CPU makes no scores
                return [selected]
            scores = indexer_scores(*given, key_format=kind)
            unseen = torch.arange(scores.shape[1], device=q.device) >= given[-1].visible[:, None]
            padded = scores.new_zeros(len(scores), T)
            padded[:, : scores.shape[1]] = scores.masked_fill(unseen, 0.0)
            return [selected, padded]

        return run

    def lightning_indexer(self) -> Rows:
        return self.index(self.dtype)

    def lightning_indexer_fp8(self) -> Rows:
        return self.index(FP8)

    def attention(self, dtype: torch.dtype) -> Rows:
        kind = latent_format(128, 16, dtype)
        pool, tables, _ = self.make.paged(kind)
        pool, tables = self.on(pool, tables)
        q, slots = self.x(T, HEADS, 144), torch.stack([self.make.order(T)[:16] for _ in range(T)]).to(self.device)
        how = {"row_format": kind, "scale": 0.1}
        return lambda rows: [
            *dense_mla(q[rows], pool, tables, self.segments(rows), **how),
            *sparse_attention(q[rows], pool, slots[rows], **how),
        ]

    def attention_plain(self) -> Rows:
        return self.attention(self.dtype)

    def attention_fp8(self) -> Rows:
        return self.attention(FP8)

    def rows(self) -> Rows:
        x, y, weight, pairs = self.x(T, 256), self.x(T, 256), self.x(256), self.make.order(T * 4).view(T, 4)
        results, (pairs, weights) = self.x(T * 4, 256), self.on(pairs, self.make.floats(T, 4))
        return lambda rows: [
            rms_norm(x[rows], weight, 1e-6), *add_rms_norm(x[rows], y[rows], weight, 1e-6, x[rows]),
            silu_mul(x[rows]), combine(results, pairs[rows], weights[rows]),
        ]  # fmt: skip

    def store(self, dtype: torch.dtype) -> Rows:
        latent, key, (cos, sin) = (
            latent_format(128, 16, dtype),
            index_key_format(32, dtype),
            self.on(*self.make.angles(8)),
        )
        x, y, weight = self.x(T, 144), self.x(T, 32), self.x(128)
        norm = self.x(32, dtype=torch.float32), self.x(32, dtype=torch.float32)
        q, head_weights = self.x(T, 12, 32), self.x(T, 12, dtype=torch.float32)

        def run(rows: slice) -> list[torch.Tensor]:
            count = rows.stop - rows.start
            outs = [torch.zeros(count, one.columns, dtype=one.pool_dtype, device=self.device) for one in (latent, key)]
            turns = cos[rows], sin[rows]
            store_latent(x[rows], weight, 1e-6, *turns, outs[0], row_format=latent, interleaved=True)
            store_index_keys(y[rows], *norm, 1e-6, *turns, outs[1], key_format=key, interleaved=False)
            if dtype == FP8:
                codes, scaled = quantize_index_queries(
                    q[rows], head_weights[rows], *turns, key_format=key, interleaved=False
                )
                outs += [codes.view(torch.uint8), scaled]
            return outs

        return run

    def store_plain(self) -> Rows:
        return self.store(self.dtype)

    def store_fp8(self) -> Rows:
        return self.store(FP8)


OPERATIONS = [
    Given.linear, Given.per_head_matmul, Given.quantized_linear, Given.block_scaled_linear, Given.expert_mlp,
    Given.route, Given.lightning_indexer, Given.lightning_indexer_fp8, Given.attention_plain, Given.attention_fp8,
    Given.rows, Given.store_plain, Given.store_fp8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["32", "16", "b16"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_rows_alone_and_together(
    operation: Callable[[Given], Rows], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows at once against pieces of 1, 2, 17 and the rest, on chips of other sizes."""
    if dtype == torch.bfloat16 and INTERPRETED:
        pytest.skip("the interpreter does not multiply bfloat16")
    if device == "cpu" and not INTERPRETED and cpu.library() is None:
        pytest.skip("no C++ compiler, or DSA_ENGINE_NATIVE=0")
    run = operation(Given(device, dtype))
    with launch.batch_invariance(True):
        together = run(slice(0, T))
        for processors in (1000,) if INTERPRETED else (None,):
            if processors:
                monkeypatch.setattr(launch, "_INTERPRETED_MULTIPROCESSORS", processors)
            parts = zip(*(run(slice(*cut)) for cut in pairwise(CUTS)), strict=True)
            for whole, pieces in zip(together, parts, strict=True):
                joined = torch.cat(pieces)
                assert whole.isfinite().all() if whole.is_floating_point() else True
                assert torch.equal(whole.view(torch.uint8), joined.view(torch.uint8))


@pytest.mark.parametrize("way", [launch.references, lambda: operation.compared(operation.Comparison())])
def test_another_engine_compares_its_kernels(way: Callable[[], AbstractContextManager[object]], device: str) -> None:
    """An engine that starts in another thread of the process runs references there alone."""
    if device == "cpu" and not INTERPRETED and cpu.library() is None:
        pytest.skip("no C++ compiler, or DSA_ENGINE_NATIVE=0")
    x, weight = Make().floats(T, HIDDEN).to(device), Make().floats(51, HIDDEN).to(device)
    other = way()
    with launch.batch_invariance(True), ThreadPoolExecutor(1) as thread:
        wanted = linear(x, weight)
        thread.submit(other.__enter__).result()
        beside = linear(x, weight)
        thread.submit(other.__exit__, None, None, None).result()
        assert torch.equal(beside, wanted)


@pytest.mark.parametrize("kernels", ["reference", "replaced"])
def test_another_engine_runs_references(kernels: str, device: str) -> None:
    """What it has found at its start is not of an engine with ``batch_invariant``, which found all kernels right."""
    if device == "cpu" and not INTERPRETED and cpu.library() is None:
        pytest.skip("no C++ compiler, or DSA_ENGINE_NATIVE=0")
    x, weight = Make().floats(T, HIDDEN).to(device), Make().floats(51, HIDDEN).to(device)
    try:
        with launch.batch_invariance(True):
            wanted = linear(x, weight)
            launch.use_references(always=kernels == "reference")
            operation.replace({"linear": "it is wrong"} if kernels == "replaced" else {})
            assert torch.equal(linear(x, weight), wanted)
            with operation.compared(operation.Comparison()):
                compared = linear(x, weight)
        assert torch.equal(linear(x, weight), F.linear(x, weight))
        assert kernels == "reference" or torch.equal(compared, F.linear(x, weight)), (
            "not run again where it is compared"
        )
    finally:
        launch.use_references(always=False)
        operation.replace({})
