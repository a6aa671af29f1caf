"""Sparse attention of many rows on Hopper, in Gluon: what :func:`.sparse_attention.sparse_attention` computes, for
bfloat16 rows of 512 + 64 numbers, 64 or 128 heads and slots by the hundred and twenty-eight.

A program attends with 64 heads of a token. Three groups of four warps work at the same time, where Triton's kernel does
everything in turn:

    scores and left    scores of each block of 64 rows, their softmax, and columns 0 to 255 of the values
    right              columns 256 to 511
    copies             rows of the next blocks from global to shared memory, 16 bytes a thread

Shared memory, 230,152 of the 232,448 bytes that a program may have: queries 73,728, two blocks of rows 147,456, weights
8,192, and a factor and a sum for each head. A block's barriers: ``ready`` when its rows have come; ``stored`` when its
weights and factors are written; ``taken`` when the right side has read these; ``free`` when both sides have read its
rows. On an H100 with Triton 3.6: 484 TFLOP/s for 2,048 rows of 131,072, 528 of 8,192 (Triton's kernel: 316, 345).

Gluon has no interpreter, and its interface may change with Triton's version: see :mod:`..libraries.gluon`, which tries
the kernel before it is used. ``gl.barrier``, which Triton 3.6 does not have, is avoided.

Bits of a token: they depend on its query and the rows of its slots in their order.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsa_engine.kernels.attention._online_softmax import LN_2, LOG2_E, LOWEST
from dsa_engine.kernels.runtime.integers import next_power_of_2

RANK, ROPE, BLOCK_HEADS = 512, 64, 64
_RANK, _WIDTH, _HALF, _ROPE = gl.constexpr(RANK), gl.constexpr(RANK + ROPE), gl.constexpr(RANK // 2), gl.constexpr(ROPE)


@gluon.jit
def _zero():
    """Zero, which the compiler does not know: as an index of a buffer it keeps the hundred descriptors of a step's
    products from being computed before the loop, for which there are no registers (616 bytes of stack a thread)."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _scan(slots, k, SCAN: gl.constexpr):
    """The index of the first slot −1 (k without one), the one after the last slot, and the greatest slot."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    entry = gl.arange(0, SCAN, layout=L)
    slot = gl.load(slots + gl.minimum(entry, k - 1))
    inside = entry < k
    hole = gl.min(gl.where(inside & (slot < 0), entry, k), 0)
    end = gl.max(gl.where(inside & (slot >= 0), entry + 1, 0), 0)
    return hole, end, gl.max(slot, 0)


@gluon.jit
def _copy(target, rows, row, first, COLUMNS: gl.constexpr, L: gl.constexpr):
    """Starts to copy ``COLUMNS`` columns, from ``first`` on, of 64 rows."""
    column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    async_copy.async_copy_global_to_shared(target, rows + row[:, None] * _WIDTH + column[None, :])


@gluon.jit
def _copies(rows, slots, pairs, greatest, k_left, k_right, k_rotated, ready, free):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for pair in range(pairs):
        for i in gl.static_range(2):
            slot = gl.load(slots + (pair * 2 + i) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L)))
            # −1, as unsigned the largest number, loads the row of the greatest slot: one that was never written may
            # hold NaN.
            row = gl.minimum(slot.to(gl.uint32, bitcast=True), greatest.to(gl.uint32, bitcast=True)).to(gl.int64)
            mbarrier.wait(free.index(i), (pair & 1) ^ 1)
            _copy(k_left.index(i), rows, row, 0, _HALF, L)
            _copy(k_right.index(i), rows, row, _HALF, _HALF, L)
            _copy(k_rotated.index(i), rows, row, _RANK, _ROPE, L)
            async_copy.mbarrier_arrive(ready.index(i), increment_count=False)


@gluon.jit
def _scores_and_left(
    slots, out, lse, blocks, hole, scale, q_left, q_right, q_rotated, k_left, k_right, k_rotated, weights, factor, sums,
    ready, free, stored, taken, summed,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    HEADS: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS: gl.constexpr = gl.SliceLayout(1, VALUES)
    acc = gl.zeros([64, 256], gl.float32, VALUES)
    top = gl.full([64], LOWEST, gl.float32, HEADS)
    total = gl.zeros([64], gl.float32, HEADS)
    for block in range(blocks):
        zero = _zero()
        at = zero + (block & 1)
        mbarrier.wait(ready.index(block & 1), (block >> 1) & 1)
        scores = gl.zeros([64, 64], gl.float32, SCORES)
        scores = warpgroup_mma(
            q_left.index(zero), k_left.index(at).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(q_right.index(zero), k_right.index(at).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(q_rotated.index(zero), k_rotated.index(at).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
        if block * 64 + 64 > hole:
            slot = gl.load(slots + block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES)))
            scores = gl.where((slot >= 0)[None, :], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        shrink = gl.exp2(top - new_top)
        p = gl.exp2(scores - new_top[:, None])
        total = total * shrink + gl.sum(p, 1)
        top = new_top
        rounded = p.to(gl.bfloat16)
        mbarrier.wait(taken, (block & 1) ^ 1)
        factor.store(shrink)
        weights.index(zero).store(rounded)
        fence_async_shared()
        mbarrier.arrive(stored, count=1)
        acc = acc * gl.convert_layout(shrink, ROWS)[:, None]
        acc = warpgroup_mma(gl.convert_layout(rounded, OPERAND), k_left.index(at), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(block & 1), count=1)
    sums.store(total)
    mbarrier.arrive(summed, count=1)
    _store(out, 0, acc, gl.convert_layout(total, ROWS), VALUES)
    head = gl.arange(0, 64, layout=HEADS)
    gl.store(lse + head, gl.where(total > 0, (top + gl.log2(total)) * LN_2, float("-inf")))


@gluon.jit
def _right(out, blocks, k_right, weights, factor, sums, free, stored, taken, summed):
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, VALUES)
    acc = gl.zeros([64, 256], gl.float32, VALUES)
    for block in range(blocks):
        zero = _zero()
        mbarrier.wait(stored, block & 1)
        acc = acc * factor.load(ROWS)[:, None]
        acc = warpgroup_mma(weights.index(zero), k_right.index(zero + (block & 1)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(free.index(block & 1), count=1)
    mbarrier.wait(summed, 0)
    _store(out, _HALF, acc, sums.load(ROWS), VALUES)


@gluon.jit
def _store(out, first, acc, total, VALUES: gl.constexpr):
    """Stores 256 columns of the results; zeros where no slot was attended to."""
    result = acc * gl.where(total > 0, 1.0 / total, 0.0)[:, None]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, VALUES))
    column = first + gl.arange(0, 256, layout=gl.SliceLayout(0, VALUES))
    gl.store(out + row[:, None] * _RANK + column[None, :], result.to(gl.bfloat16))


@gluon.jit
def sparse_prefill_kernel(q, rows, slots, out, lse, k, scale, HEADS: gl.constexpr, SCAN: gl.constexpr):
    """64 heads of a token a program; programs of one token are neighbours and read its rows at the same time."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCKS: gl.constexpr = HEADS // 64
    token = (gl.program_id(0) // BLOCKS).to(gl.int64)
    head = gl.program_id(0) % BLOCKS * 64
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SWIZZLED)
    q_rotated = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SWIZZLED)
    k_left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLED)
    k_right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLED)
    k_rotated = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SWIZZLED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SWIZZLED)
    factor = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    stored = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=128)  # threads that copy
        mbarrier.init(free.index(i), count=2)  # sides
    mbarrier.init(stored, count=1)
    mbarrier.init(taken, count=1)
    mbarrier.init(summed, count=1)
    row = head + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    queries = q + token * (HEADS * _WIDTH)
    _copy(q_left.index(0), queries, row, 0, _HALF, L)
    _copy(q_right.index(0), queries, row, _HALF, _HALF, L)
    _copy(q_rotated.index(0), queries, row, _RANK, _ROPE, L)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    slots += token * k
    hole, end, greatest = _scan(slots, k, SCAN)
    pairs = (end + 127) // 128
    out += (token * HEADS + head) * _RANK
    lse += token * HEADS + head
    gl.warp_specialize(
        [
            (_scores_and_left, (slots, out, lse, pairs * 2, hole, scale, q_left, q_right, q_rotated, k_left, k_right,
                                k_rotated, weights, factor, sums, ready, free, stored, taken, summed)),
            (_right, (out, pairs * 2, k_right, weights, factor, sums, free, stored, taken, summed)),
            (_copies, (rows, slots, pairs, greatest, k_left, k_right, k_rotated, ready, free)),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=[176, 80],  # a thread; those of scores and left have what these leave, 248
    )  # fmt: skip


def sparse_prefill(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernel: ``q [T, heads, 576]``, ``pool [pages, page_size, 576]``, both bfloat16, ``slots [T, k]``; k is a
    multiple of 128. Out ``[T, heads, 512]``, and log-sum-exp ``[T, heads]`` float32."""
    (tokens, heads, _), k = q.shape, slots.shape[1]
    out, lse = q.new_empty(tokens, heads, RANK), torch.empty(tokens, heads, device=q.device)
    sparse_prefill_kernel[(tokens * heads // BLOCK_HEADS,)](
        q.contiguous(), pool, slots.contiguous(), out, lse, k, scale * LOG2_E, HEADS=heads, SCAN=next_power_of_2(k),
        num_warps=4,
    )  # fmt: skip
    return out, lse
