"""The common part of attention over latent rows: tile sizes, queries and results of a program, one step of the online
softmax, and the loop over the rows, which the format's helpers load (:class:`.row_format.Helpers`).

    s = scale · log2(e) · q · rowᵀ      top' = max(top, s)      p = 2^(s − top')      r = 2^(top − top')
    total' = r · total + Σ p            acc' = r · acc + p · row[:value_dim]
    out = acc / total                   log-sum-exp = ln 2 · (top + log2(total))

A program attends with ``BLOCK_HEADS`` heads of one token to ``BLOCK_ROWS`` rows a step. Each row is read once: one
buffer in shared memory serves both products, as key (whole) and as value (its first columns). The columns without and
with rotation are two tiles, since 576 is no power of two.

Bits of a token: they depend on its query, the rows it sees in their order, and the number of parts, which follows from
that of tokens; under :func:`.launch.batch_invariance` there is one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.attention.merge_splits import merge_splits
from dsa_engine.kernels.formats.plain_cache import load_tile
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.launch import chip_of, config_for, dot_precision, is_batch_invariant

MAX_SPLITS = 64  # as many as merge_splits reads at a time
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)

# Below every score, and finite: 2^(−inf − LOWEST) is 0 where 2^(−inf − (−inf)) would be NaN.
LOWEST = tl.constexpr(-3.0e38)


class Tiles(NamedTuple):
    heads: int  # largest number for a program
    rows: int  # rows of a step
    warps: int
    stages: int
    least: int = 16  # smallest number of heads; of fewer, the last one is computed more than once


class Tilings(NamedTuple):
    """Tiles by the type of the rows in shared memory."""

    half: Tiles  # rows of 2 bytes a number
    coded: Tiles  # rows of codes (656 bytes in FP8), and their 2-byte numbers
    full: Tiles  # rows of 4 bytes a number


# sm_90, half: 64 x 64 is the largest tile for which the 64 x 512 float32 accumulator (128 of a thread's 255 registers,
# with 8 warps) and two buffers of rows (2 x 72 KB, beside 72 KB of queries) fit. The third stage is no third buffer: it
# reads the numbers of the rows a step ahead, so that their copies wait for nothing. With 32 rows there would be room
# for more copies in flight, but a warpgroup's half of the scores would be 16 columns wide, and its products limited by
# reading the queries from shared memory.
# coded: the bytes of the next step's rows wait in registers (40 of a thread's on sm_90) while this step multiplies, and
# shared memory takes rows as numbers only; nothing is left for stages to do. With 64 rows a warpgroup's product of
# scores is 32 columns wide, with 32 rows 16, which takes 20 cycles to read its operands and 8 to multiply. Wgmma takes
# 64 heads, and mma.sync over 16 or 32 takes longer for the same rows. Elsewhere the largest that fits in registers: of
# 32 heads 4 warps compute the scores twice and 8 warps four times, and tcgen05, which takes 64, spills 104 bytes and
# more. float32 products are no tensor core's: small tiles, for correctness.
TILINGS = {
    80: Tilings(half=Tiles(64, 32, 8, 2), coded=Tiles(64, 16, 8, 1), full=Tiles(16, 16, 8, 1)),
    90: Tilings(half=Tiles(64, 64, 8, 3), coded=Tiles(64, 64, 8, 1, least=64), full=Tiles(16, 16, 8, 1)),
    100: Tilings(half=Tiles(64, 32, 8, 3), coded=Tiles(32, 16, 4, 1), full=Tiles(16, 16, 8, 1)),
    120: Tilings(half=Tiles(64, 16, 8, 2), coded=Tiles(32, 16, 4, 1), full=Tiles(16, 16, 8, 1)),
}


def check_queries(q: torch.Tensor, pool: torch.Tensor, row_format: LatentFormat) -> None:
    """Raises ``ValueError`` unless ``q [T, heads, width]`` can attend to a pool of such rows."""
    if q.dim() != 3 or pool.dim() != 3:
        raise ValueError(
            f"q must be [T, heads, width] and the pool [pages, page_size, columns], not {tuple(q.shape)} and "
            f"{tuple(pool.shape)}"
        )
    if q.shape[-1] != row_format.width or row_format.rank < 1 or not row_format.reads_as(q.dtype):
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} does not fit rows of {row_format}")
    row_format.check_pool(pool)


@lru_cache(maxsize=4096)
def choose_splits(programs: int, steps: int, processors: int, max_splits: int) -> int:
    """Number of parts, at most ``max_splits``, into which the steps of each of ``programs`` programs are cut to finish
    first.

    The cost is counted in steps of about 2 µs: the rounds that the parts need on the chip, each with its steps and two
    more to begin and end; and a thirtieth for each part, whose 128 KB are written and read again to be merged.
    """

    def cost(splits: int) -> float:
        rounds = cdiv(programs * splits, processors)
        return rounds * (cdiv(steps, splits) + 2) + (programs * splits / 30 if splits > 1 else 0)

    return min(range(1, max(1, min(max_splits, steps)) + 1), key=cost)


def launch_attention(
    kernel: Any, q: torch.Tensor, pool: torch.Tensor, row_format: LatentFormat, inputs: Sequence[Any], longest: int,
    scale: float, workspace: int, **constants: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launches a kernel of attention over latent rows, a program for some heads of a token and a part of its rows, and
    merges the parts.

    Args:
        kernel: takes ``q, rows of the pool, *tensors, out [splits, T, heads, value_dim], lse [splits, T, heads],
            tokens, number, scale · log2(e)``, of which ``inputs`` are the tensors and the number, and constants.
        q: contiguous.
        longest: largest number of rows of a query.
        workspace: bytes for the float32 results of the parts.

    Returns:
        out ``[T, heads, value_dim]`` in q's dtype; log-sum-exp ``[T, heads]`` float32.
    """
    (tokens, heads, _), value_dim = q.shape, row_format.rank
    tilings = config_for(TILINGS, chip_of(q))
    tiles = tilings.full if q.dtype == torch.float32 else tilings.coded if row_format.coded else tilings.half
    block_heads = min(tiles.heads, max(tiles.least, next_power_of_2(heads)))
    programs = tokens * cdiv(heads, block_heads)
    room = 1 if is_batch_invariant() else workspace // max(1, 4 * tokens * heads * (value_dim + 1))
    splits = choose_splits(programs, cdiv(longest, tiles.rows), chip_of(q).multiprocessors, min(MAX_SPLITS, room))
    dtype = q.dtype if splits == 1 else torch.float32
    out = torch.empty(splits, tokens, heads, value_dim, dtype=dtype, device=q.device)
    lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    if programs:
        rows, (*tensors, number) = row_format.rows(pool), inputs
        kernel[(programs, splits)](
            q, rows, *tensors, out, lse, tokens, number, scale * LOG2_E, STRIDE=rows.shape[1], HEADS=heads,
            VALUE=value_dim, ROTATED=row_format.rope, BLOCK_HEADS=block_heads, BLOCK_ROWS=tiles.rows,
            BLOCK_VALUE=max(row_format.least_block, next_power_of_2(value_dim)),
            BLOCK_ROTATED=max(16, next_power_of_2(row_format.rope)), FORMAT=row_format.helpers,
            E4M3=chip_of(q).capability >= 89,  # older chips have no conversion
            PRECISION=dot_precision(q.dtype), num_warps=tiles.warps, num_stages=tiles.stages, **constants,
        )  # fmt: skip
    return (out[0], lse[0]) if splits == 1 else merge_splits(out, lse, q.dtype)


@triton.jit
def load_queries(
    q, token, head, HEADS: tl.constexpr, VALUE: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Tiles ``[BLOCK_HEADS, BLOCK_VALUE]`` and ``[BLOCK_HEADS, BLOCK_ROTATED]``. Heads beyond the last repeat it, and
    their results are not stored."""
    first = q + (token * HEADS + tl.minimum(head, HEADS - 1))[:, None] * (VALUE + ROTATED)
    value = load_tile(first, FORMAT.columns(BLOCK_VALUE), VALUE, BLOCK_VALUE)
    return value, load_tile(first + VALUE, tl.arange(0, BLOCK_ROTATED), ROTATED, BLOCK_ROTATED)


@triton.jit
def attend(
    q_value, q_rotated, tile, rotated, entry, stop, partial, slots, top, total, acc, scale,
    ROTATED: tl.constexpr, HOLES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step: the rows ``tile [BLOCK_ROWS, BLOCK_VALUE]`` and ``rotated [BLOCK_ROWS, BLOCK_ROTATED]``, numbered
    ``entry [BLOCK_ROWS]`` among those that the query sees. With ``partial`` (a scalar) those from ``stop`` on are left
    out and, with HOLES, those where ``slots`` is negative. ``scale`` holds log2(e)."""
    # Scaled before they are added: else Triton makes the sum the first product's accumulator, and see below.
    scores = tl.dot(q_value, tl.trans(tile), input_precision=PRECISION) * scale
    if ROTATED:
        scores += tl.dot(q_rotated, tl.trans(rotated), input_precision=PRECISION) * scale
    # The branch is more than a saving. When Triton sees that one product feeds another, it puts all warps along the
    # heads, and two warpgroups with 64 heads do the same work twice; a branch between the products hides it.
    if partial:
        attended = entry < stop
        if HOLES:
            attended = tl.load(slots + entry, mask=attended, other=-1) >= 0
        scores = tl.where(attended[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(tile.dtype), tile, acc=acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def store_results(
    out, lse, tokens, token, head, top, total, acc, HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Stores a program's part of ``out [splits, tokens, HEADS, VALUE]`` and ``lse [splits, tokens, HEADS]``, after one
    step at least. ``token`` is int64."""
    columns = FORMAT.columns(BLOCK_VALUE)[None, :]
    known = head < HEADS
    row = (tl.program_id(1) * tokens + token) * HEADS + head
    if FORMAT.coded:  # first: top then needs no more registers, of which the loop spilled some (Triton 3.7, sm_120)
        tl.store(lse + row, (top + tl.log2(total)) * LN_2, mask=known)
    result = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * VALUE + columns, result, mask=known[:, None] & (columns < VALUE))
    if not FORMAT.coded:
        tl.store(lse + row, (top + tl.log2(total)) * LN_2, mask=known)


@triton.jit
def store_nothing(out, lse, tokens, token, head, HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr):
    """Stores the results of a program without rows: zeros and −inf. A kernel returns early with it: ptxas was seen to
    order a step's products one after the other in a loop that might take no step."""
    columns = tl.arange(0, BLOCK_VALUE)[None, :]
    known = head < HEADS
    row = (tl.program_id(1) * tokens + token) * HEADS + head
    nothing = tl.zeros([head.shape[0], BLOCK_VALUE], out.dtype.element_ty)
    tl.store(out + row[:, None] * VALUE + columns, nothing, mask=known[:, None] & (columns < VALUE))
    tl.store(lse + row, tl.full(head.shape, float("-inf"), tl.float32), mask=known)


@triton.jit
def program_heads(HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Token, int64, and heads ``[BLOCK_HEADS]`` of a program. Programs of one token are neighbours and read its rows at
    the same time, the second from L2."""
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    return (program // HEAD_BLOCKS).to(tl.int64), (program % HEAD_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)


@triton.jit
def program_span(count, BLOCK_ROWS: tl.constexpr):
    """First of the ``count`` rows of a token that this split attends to, and the one after its last."""
    span = tl.cdiv(tl.cdiv(count, BLOCK_ROWS), tl.num_programs(1)) * BLOCK_ROWS
    first = tl.program_id(1) * span
    return first, tl.minimum(first + span, count)


@triton.jit
def attend_to_rows(
    q, pool, out, lse, tokens, token, head, first, stop, hole, source, scale,
    INDEX: tl.constexpr, ROW: tl.constexpr, HOLES: tl.constexpr, STRIDE: tl.constexpr, HEADS: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr, FORMAT: tl.constexpr, E4M3: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a program's heads to the rows ``first … stop-1`` of its token, one at least, and its results.

    ``INDEX(source, entry, stop)`` loads the slots or pages of the entries ``entry [BLOCK_ROWS]``, and
    ``ROW(index, source, entry, stop)`` computes their rows of the pool; entries from ``stop`` on repeat the last one,
    so that loads need no mask. The steps before ``hole`` leave out no entry. With HOLES ``source[0]`` points to slots,
    and entries whose slot is negative are left out."""
    q_value, q_rotated = load_queries(q, token, head, HEADS, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED, FORMAT)
    top = tl.full([BLOCK_HEADS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_VALUE], tl.float32)
    entry = first + tl.arange(0, BLOCK_ROWS)
    if FORMAT.coded:
        row = ROW(INDEX(source, entry, stop), source, entry, stop)
        words, factors, pairs = FORMAT.load(pool, row, STRIDE, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED)
        index = INDEX(source, entry + BLOCK_ROWS, stop)
    for start in range(first, stop, BLOCK_ROWS):
        entry = start + tl.arange(0, BLOCK_ROWS)
        if FORMAT.coded:
            # The next step's words, and the indices of the one after, come while this one multiplies.
            tile, rotated = FORMAT.expand(words, factors, pairs, q.dtype.element_ty, E4M3)
            row = ROW(index, source, entry + BLOCK_ROWS, stop)
            words, factors, pairs = FORMAT.load(pool, row, STRIDE, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED)
            index = INDEX(source, entry + 2 * BLOCK_ROWS, stop)
        else:
            row = ROW(INDEX(source, entry, stop), source, entry, stop)
            tile, rotated = FORMAT.load(pool, row, STRIDE, VALUE, ROTATED, BLOCK_VALUE, BLOCK_ROTATED)
        partial = start + BLOCK_ROWS > hole
        top, total, acc = attend(
            q_value, q_rotated, tile, rotated, entry, stop, partial, source[0], top, total, acc, scale,
            ROTATED, HOLES, PRECISION,
        )  # fmt: skip
    store_results(out, lse, tokens, token, head, top, total, acc, HEADS, VALUE, BLOCK_VALUE, FORMAT)
