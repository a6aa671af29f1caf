"""Dense causal attention in absorbed form, straight over the paged latent cache.

    out[t, h] = softmax(scale · q[t, h] · row[0 … position of t]ᵀ) · row[…][:value_dim]

For few queries over many cached tokens (decode of sequences that see at most ``index_topk`` tokens, and of models
without an indexer): expanding the cache to per-head keys and values would cost more than it saves.

Bits of a token: as :mod:`._online_softmax` says. On a CPU PyTorch's products add in orders that follow from the number
of tokens; under :func:`.launch.batch_invariance` sparse attention over all visible rows runs instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.attention._online_softmax import (
    attend_to_rows,
    check_queries,
    launch_attention,
    program_heads,
    program_span,
    store_nothing,
)
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.paged import read_rows
from dsa_engine.kernels.rows.segment import Segments, slots_of
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation


def dense_mla_block_reference(
    q: torch.Tensor, rows: torch.Tensor, visible: torch.Tensor, value_dim: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``visible [T]``: the number of ``rows [R, width]`` that each query sees."""
    count, heads, width = q.shape
    rows = rows.float()
    scores = (q.reshape(-1, width).float() @ rows.t()).view(count, heads, -1).mul_(scale)
    unseen = torch.arange(len(rows), device=q.device) >= visible[:, None]
    scores.masked_fill_(unseen[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # A padding row sees nothing and has a log-sum-exp of −inf; 0 instead makes its probabilities 0.
    top = lse.masked_fill(lse == float("-inf"), 0.0)
    out = scores.sub_(top[..., None]).exp_().view(count * heads, -1) @ rows[:, :value_dim]
    return out.view(count, heads, value_dim).to(q.dtype), lse


def dense_mla_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    row_format: LatentFormat,
    scale: float,
    workspace: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, _ = q.shape
    value_dim = row_format.rank
    out = torch.empty(q.shape[0], heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    # The device knows how many tokens a row sees: in a padded step the segments on the host are those of the bucket.
    visible = segments.visible.tolist()
    for segment in segments:
        end = max(visible[segment.row : segment.row + segment.length])
        rows = row_format.unpack(read_rows(pool, block_tables[segment.sequence], 0, end)).to(q.dtype)
        block = max(1, workspace // max(1, 8 * heads * end))
        for first in range(segment.row, segment.row + segment.length, block):
            stop = min(first + block, segment.row + segment.length)
            part, seen = slice(first, stop), rows[: max(visible[first:stop])]
            out[part], lse[part] = dense_mla_block_reference(q[part], seen, segments.visible[part], value_dim, scale)
    return out, lse


def _by_slots(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    row_format: LatentFormat,
    scale: float,
    workspace: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention to the slots of all positions that a query sees."""
    positions = torch.arange(segments.longest, dtype=torch.int32, device=q.device)
    block, parts = max(1, workspace // max(1, 16 * segments.longest)), []
    for first in range(0, q.shape[0], block):
        rows = slice(first, first + block)
        seen = positions < segments.visible[rows, None]
        slots = slots_of(torch.where(seen, positions, -1), block_tables, segments.sequences[rows], pool.shape[1])
        parts.append(
            sparse_attention(q[rows], pool, slots, row_format=row_format, scale=scale, workspace=workspace // 2)
        )
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@triton.jit
def page_at(source, position, stop):
    """The pages in which ``position [rows]`` lie."""
    return tl.load(source[0] + row_position(position, stop) // source[1])


@triton.jit
def row_in_page(page, source, position, stop):
    """The rows of the flattened pool at ``position [rows]``, of their pages."""
    return page.to(tl.uint32) * source[1] + row_position(position, stop) % source[1]


@triton.jit
def row_position(position, stop):
    """``position [rows]``, or the last one from ``stop`` on. Unsigned, which divides in fewer instructions."""
    return tl.minimum(position, stop - 1).to(tl.uint32)


@kernel(do_not_specialize=["tokens"])
def dense_mla_kernel(
    q, pool, block_tables, sequences, visible, out, lse, tokens, table_stride, scale,
    PAGE_SIZE: tl.constexpr, STRIDE: tl.constexpr,
    HEADS: tl.constexpr, VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
    FORMAT: tl.constexpr, E4M3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_HEADS heads of a token and a part of the positions it sees; the result goes to its part of ``out [splits,
    T, HEADS, VALUE]``."""
    token, head = program_heads(HEADS, BLOCK_HEADS)
    table = block_tables + tl.load(sequences + token).to(tl.int64) * table_stride
    first, stop = program_span(tl.load(visible + token), BLOCK_ROWS)
    if stop <= first:
        store_nothing(out, lse, tokens, token, head, HEADS, VALUE, BLOCK_VALUE)
        return
    attend_to_rows(
        q, pool, out, lse, tokens, token, head, first, stop, stop, (table, PAGE_SIZE), scale, page_at, row_in_page,
        False, STRIDE, HEADS, VALUE, ROTATED, BLOCK_HEADS, BLOCK_ROWS, BLOCK_VALUE, BLOCK_ROTATED, FORMAT, E4M3,
        PRECISION,
    )  # fmt: skip


@operation(waits=True)
def dense_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    block_tables: torch.Tensor,
    segments: Segments,
    *,
    row_format: LatentFormat,
    scale: float,
    workspace: int = 256 << 20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to all tokens of its sequence up to itself.

    Args:
        q: ``[T, heads, width]`` absorbed queries, float32, float16 or bfloat16.
        pool: latent pool ``[pages, page_size, columns]`` in ``row_format``.
        block_tables: ``[sequences, max_pages]`` int32.
        row_format: format of the pool; plain rows have q's dtype, and the first ``rank`` numbers of a row are its
            value.
        workspace: bytes for the scores (reference) or for partial results (kernel, where few queries are split).

    Returns:
        out ``[T, heads, rank]`` in q's dtype; log-sum-exp ``[T, heads]`` float32 (natural logarithm).
    """
    check_queries(q, pool, row_format)
    segments.check(q.shape[0], block_tables, pool.shape[1])
    if runs_triton(q):
        tables = block_tables if block_tables.stride(-1) == 1 else block_tables.contiguous()
        inputs = tables, segments.sequences, segments.visible, tables.stride(0)
        return launch_attention(
            dense_mla_kernel, q.contiguous(), pool, row_format, inputs, segments.longest, scale, workspace,
            PAGE_SIZE=pool.shape[1],
        )  # fmt: skip
    if is_batch_invariant() and q.shape[0]:
        return _by_slots(q, pool, block_tables, segments, row_format, scale, workspace)
    return dense_mla_reference(q, pool, block_tables, segments, row_format, scale, workspace)
