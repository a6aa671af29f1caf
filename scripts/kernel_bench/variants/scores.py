"""Index scores of a prefill over FP8 keys on Hopper, in Gluon: what :func:`.indexer_scores.indexer_scores` computes for
64 heads of 128 and pages of 64 keys.

A program has 256 keys and up to 256 queries of a sequence. Four groups of four warps have a page of keys each, as an
operand in registers, and multiply it with the heads of two queries a step. They run apart from each other: while one
multiplies, the others weigh and sum. A fifth group copies queries and weights to shared memory, 8 steps ahead. A
stage's barriers: ``ready`` when its queries and weights have come; ``free`` when the four groups have read them.

Expected on an H100: 1,000 to 1,100 TFLOP/s for 2,048 queries of 131,072 tokens, where Triton's kernel does 893. Both
triton 3.6.0 and 3.7.1 make 210 instructions a warp and step, without spills, beside 256 cycles of the tensor cores;
Triton's kernel has 246, 64 of which are maxima, at half rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import INTERPRETED, chip_of, runs_triton
from kernel_cases.attention import indexer_prefill
from kernel_cases.inputs import Call, Inputs, KernelCase, Sizes, referenced

HEADS, DIM, PAGE, GROUPS, STAGES = (gl.constexpr(number) for number in (64, 128, 64, 4, 8))
KEYS = 256  # of a program: GROUPS * PAGE


@gluon.jit
def _copies(q, weights, count, queries, factors, ready, free):
    """``count`` queries, two a stage. After an odd number of them, the last line stands for those of a second one."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    factor = gl.arange(0, 2 * HEADS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    for step in range((count + 1) // 2):
        at, done, last = step % STAGES, step * (2 * HEADS), count * HEADS - 1
        line = gl.minimum(done + head, last)
        mbarrier.wait(free.index(at), (step // STAGES & 1) ^ 1)
        async_copy.async_copy_global_to_shared(queries.index(at), q + line[:, None] * DIM + column[None, :])
        async_copy.async_copy_global_to_shared(factors.index(at), weights + gl.minimum(done + factor, last))
        async_copy.mbarrier_arrive(ready.index(at), increment_count=False)


@gluon.jit
def _scores(
    group: gl.constexpr, keys, key_scales, table, scores, page_stride, scale_stride, score_stride, first, end, count,
    queries, factors, ready, free,
):  # fmt: skip
    """A page of 64 keys. Those at positions from ``end`` on do not exist: what is loaded for them is not stored."""
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    KEYS: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 4)
    SUMS: gl.constexpr = gl.SliceLayout(1, PRODUCTS)
    first += group * PAGE
    page = gl.load(table + gl.minimum(first, end - 1) // PAGE).to(gl.int64)
    key = gl.arange(0, PAGE, layout=gl.SliceLayout(1, KEYS))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, KEYS))
    operand = gl.load(keys + page * page_stride + key[:, None] * DIM + column[None, :])
    key = gl.arange(0, PAGE, layout=SUMS)
    scale = gl.load(key_scales + page * scale_stride + key) * 0.5
    exists = first + key < end
    scores += first + key
    for step in range((count + 1) // 2):
        at = step % STAGES
        mbarrier.wait(ready.index(at), step // STAGES & 1)
        products = gl.zeros([PAGE, 2 * HEADS], gl.float32, PRODUCTS)
        products = warpgroup_mma(operand, queries.index(at).permute((1, 0)), products, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products,))
        # Twice the relu is x + |x|: an addition, at twice a maximum's rate. The scale is halved.
        weighted = (products + gl.abs(products)) * factors.index(at).load(gl.SliceLayout(0, PRODUCTS))[None, :]
        mbarrier.arrive(free.index(at), count=1)
        one, two = gl.split(gl.sum(weighted.reshape([PAGE, 2, HEADS]), 2))
        gl.store(scores, gl.convert_layout(one, SUMS, assert_trivial=True) * scale, mask=exists)
        second = gl.convert_layout(two, SUMS, assert_trivial=True) * scale
        gl.store(scores + score_stride, second, mask=exists & (step * 2 + 1 < count))
        scores += 2 * score_stride


@gluon.jit
def gluon_scores_kernel(
    q, weights, keys, key_scales, block_tables, tiles, sequences, visible, scores,
    table_stride, page_stride, scale_stride, score_stride,
):  # fmt: skip
    """``GROUPS`` pages of keys against one tile of queries; the axes of the launch are those of `score_tile_kernel`."""
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    row = gl.load(tiles + 2 * tile).to(gl.int64)
    count = gl.load(tiles + 2 * tile + 1)
    seen = gl.load(visible + row)
    first = gl.program_id(0) * (GROUPS * PAGE)
    begin = gl.maximum(first + 1 - seen, 0)  # the first query that sees one of these keys
    end = gl.minimum(seen + count - 1, score_stride)
    if begin >= count:
        return
    count -= begin
    row += begin
    q += row * (HEADS * DIM)
    weights += row * HEADS
    scores += row * score_stride
    table = block_tables + gl.load(sequences + row).to(gl.int64) * table_stride
    queries = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 2 * HEADS, DIM], gl.NVMMASharedLayout(128, 8, 2))
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=128)  # threads that copy
        mbarrier.init(free.index(i), count=GROUPS)
    rest = (
        keys, key_scales, table, scores, page_stride, scale_stride, score_stride, first, end, count, queries, factors,
        ready, free,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_scores, (0,) + rest),
            (_scores, (1,) + rest),
            (_scores, (2,) + rest),
            (_scores, (3,) + rest),
            (_copies, (q, weights, count, queries, factors, ready, free)),
        ],
        worker_num_warps=[4, 4, 4, 4],
        worker_num_regs=[112, 112, 112, 32],
    )


def gluon_scores(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_tables: torch.Tensor, segments: Segments, *,
    key_format: IndexKeyFormat,
) -> torch.Tensor:  # fmt: skip
    """Runs the kernel: FP8 ``q [T, 64, 128]``, pages of 64 FP8 keys."""
    (rows, width), (keys, key_scales) = (segments.rows, segments.longest), key_format.views(pool)
    assert key_scales is not None  # of FP8 keys
    scores = torch.empty(rows, cdiv(width, 16) * 16, dtype=torch.float32, device=q.device)[:, :width]
    fair = rows * width // (8 * chip_of(q).multiprocessors * KEYS)
    tiles = segments.tiles(next_power_of_2(min(256, max(8, fair))))
    gluon_scores_kernel[(cdiv(width, KEYS), len(tiles))](
        q, weights, keys, key_scales, block_tables, tiles, segments.sequences, segments.visible, scores,
        block_tables.stride(0), keys.stride(0), key_scales.stride(0), scores.stride(0), num_warps=4,
    )  # fmt: skip
    return scores


def check(scores: torch.Tensor, triton: partial[torch.Tensor]) -> None:
    """Raises ``ValueError`` where scores differ from those of ``triton`` by more than rounding. Products are the same;
    a sum over heads, in whatever order, errs by HEADS · ε/2 of the sum of its absolute terms."""
    (q, weights, *others), segments = triton.args, triton.args[-1]
    wanted, terms = (indexer_scores(q, w, *others, **triton.keywords) for w in (weights, weights.abs()))
    seen = torch.arange(segments.longest, device=q.device) < segments.visible[:, None]
    allowed = terms * (2 * q.shape[1] * torch.finfo(torch.float32).eps)
    wrong = (seen & ~((scores - wanted).abs() <= allowed)).nonzero()
    if len(wrong):
        row, key = wrong[0].tolist()
        raise ValueError(
            f"{len(wrong):,} of {int(segments.visible.sum()):,} scores differ from Triton's by more than rounding, the "
            f"first in row {row} at key {key}: {scores[row, key]:g} instead of {wanted[row, key]:g}"
        )


def checked(triton: partial[torch.Tensor], *, checks: bool = True) -> Call:
    """The variant of a call, which ``checks`` its results until one is right: before that nothing can be timed."""

    def call() -> torch.Tensor:
        nonlocal checks
        scores = gluon_scores(*triton.args, **triton.keywords)
        if checks:
            check(scores, triton)
            checks = False
        return scores

    return call


def variant_scores(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """The calls that `indexer_prefill` measures, with twice as many queries, where the chip is Hopper."""
    contexts = sizes.contexts[0], sizes.contexts[-1]
    for case in indexer_prefill(make, replace(sizes, contexts=contexts, scored=2 * sizes.scored)):
        triton: Any = case.run
        q, key_format = triton.args[0], triton.keywords["key_format"]
        if runs_triton(q) and not INTERPRETED and chip_of(q).capability == 90 and key_format.coded and q.shape[1] == 64:
            run = checked(triton, checks=q.is_cuda)  # what is compiled only has no numbers
            others = {"reference": referenced(triton), "Triton": triton, **case.baselines}
            yield replace(case, kernel=f"{case.kernel}, Gluon", run=run, baselines=others, needs=90)
