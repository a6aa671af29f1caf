"""Sparse flash attention over selected rows of the latent cache (absorbed MLA; DeepSeek-V3.2-Exp, equation 2).

    p[t, h] = softmax(scale · q[t, h] · row[slots[t]]ᵀ)      out[t, h] = p[t, h] · row[slots[t]][:value_dim]

A latent row serves as key (whole) and as value (its first ``value_dim`` columns), for all heads. Slot −1 is skipped
anywhere; a query without a single slot yields zeros and a log-sum-exp of −inf.

Bits of a token: on a CPU they depend on its query and the rows of its slots in their order, but from FP8 pools on the
number of tokens too, which then take PyTorch's products; under :func:`.launch.batch_invariance` their rows are expanded
for the CPU's kernel. Of the Triton kernel: as :mod:`._online_softmax` says.
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
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import is_batch_invariant, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# On a CPU the gathered rows of a block fit in the processor's cache; 1 MiB was the fastest of 0.5 to 16 MiB.
_CPU_BLOCK_BYTES = 1 << 20


def sparse_attention_reference(
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
    row_format: LatentFormat,
    scale: float,
    block_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, width = q.shape
    value_dim = row_format.rank
    flat = pool.view(-1, row_format.columns)
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    block = max(1, block_bytes // (max(1, slots.shape[1]) * 4 * (width + heads)))
    for first in range(0, tokens, block):
        part = slice(first, first + block)
        chosen = slots[part]
        skipped = chosen < 0
        if counts is not None:
            skipped |= torch.arange(slots.shape[1], device=q.device) >= counts[part, None]
        rows = row_format.unpack(flat[chosen.masked_fill(skipped, 0)]).to(q.dtype).float()  # [n, k, width]
        if bool(skipped.any()):
            rows.masked_fill_(skipped[..., None], 0.0)  # a row that was never written may hold NaN, and 0 · NaN is NaN
        scores = torch.bmm(q[part].float(), rows.transpose(1, 2)).mul_(scale)  # [n, heads, k]
        scores.masked_fill_(skipped[:, None], float("-inf"))
        lse[part] = torch.logsumexp(scores, dim=-1)
        # An empty row has a log-sum-exp of −inf; 0 instead makes its probabilities exp(−inf) = 0, not NaN.
        top = lse[part].masked_fill(lse[part] == float("-inf"), 0.0)
        out[part] = torch.bmm(scores.sub_(top[..., None]).exp_(), rows[..., :value_dim])
    return out, lse


@triton.jit
def scan_slots(slots, first, stop, BLOCK: tl.constexpr):
    """Looks at the entries ``first … stop-1``, at most BLOCK: returns the index of the first −1, the index after the
    last slot, and the greatest slot."""
    entry = first + tl.arange(0, BLOCK)
    inside = entry < stop
    slot = tl.load(slots + entry, mask=inside, other=-1)
    hole = tl.min(tl.where(inside & (slot < 0), entry, stop), 0)
    end = tl.max(tl.where(slot >= 0, entry + 1, first), 0)
    return hole, end, tl.max(slot, 0)


@triton.jit
def slot_at(source, entry, stop):
    """The slots at ``entry [rows]``; entries from ``stop`` on give the last slot again."""
    return tl.load(source[0] + tl.minimum(entry, stop - 1))


@triton.jit
def row_of_slot(slot, source, entry, stop):
    """The row to load for each slot; −1, as unsigned the largest number, loads the row of the greatest slot."""
    return tl.minimum(slot.to(tl.uint32, bitcast=True), source[1].to(tl.uint32, bitcast=True))


@kernel(do_not_specialize=["tokens"])
def sparse_attention_kernel(
    q, pool, slots, counts, out, lse, tokens, k, scale,
    STRIDE: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr, BLOCK_SCAN: tl.constexpr,
    COUNTED: tl.constexpr, FORMAT: tl.constexpr, E4M3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends with BLOCK_HEADS heads of a token to one split of its slots, and writes to ``out [splits, T, HEADS,
    VALUE]``."""
    token, head = program_heads(HEADS, BLOCK_HEADS)
    count = k
    if COUNTED:
        count = tl.minimum(tl.load(counts + token), k)
    first, stop = program_span(count, BLOCK_ROWS)
    chosen = slots + token * k
    hole, stop, greatest = scan_slots(chosen, first, stop, BLOCK_SCAN)
    if stop <= first:
        store_nothing(out, lse, tokens, token, head, HEADS, VALUE, BLOCK_VALUE)
        return
    attend_to_rows(
        q, pool, out, lse, tokens, token, head, first, stop, hole, (chosen, greatest), scale, slot_at, row_of_slot,
        True, STRIDE, HEADS, VALUE, ROTATED, BLOCK_HEADS, BLOCK_ROWS, BLOCK_VALUE, BLOCK_ROTATED, FORMAT, E4M3,
        PRECISION,
    )  # fmt: skip


def _run_native(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor | None, value_dim: int, scale: float,
    workspace: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Runs ``cpu/sparse_attention.cpp``: a thread takes a token at a time and gathers all its rows."""
    (tokens, heads, width), k = q.shape, slots.shape[1]
    library = cpu.kernels()
    out, lse = q.new_empty(tokens, heads, value_dim), torch.empty(tokens, heads)
    rows = pool.view(-1, width)
    numbers = library.dsa_sparse_attention_scratch(width, value_dim, k)
    threads = min(cpu.threads_for(tokens * heads * k * (width + value_dim)), max(1, workspace // (4 * numbers)))
    scratch = torch.empty(threads * numbers)
    if counts is not None:
        counts = counts.to(torch.int32).contiguous()
    outside = library.dsa_sparse_attention(
        q.data_ptr(), rows.data_ptr(), slots.data_ptr(), None if counts is None else counts.data_ptr(),
        out.data_ptr(), lse.data_ptr(), scratch.data_ptr(), cpu.TYPES[q.dtype],
        tokens, len(rows), rows.stride(0), heads, width, value_dim, k, scale, threads,
    )  # fmt: skip
    if outside:
        raise IndexError(f"slots must be below {len(rows)}, the rows of the pool")
    return out, lse


def _run_expanded(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, row_format: LatentFormat, scale: float, workspace: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expands the rows of some tokens' slots to float32 and runs the CPU's kernel over them."""
    flat, k = pool.view(-1, row_format.columns), slots.shape[1]
    block, parts = max(1, workspace // max(1, 8 * k * row_format.width)), []
    for first in range(0, len(q), block):
        chosen = slots[first : first + block]
        rows = row_format.unpack(flat[chosen.clamp(min=0)]).to(q.dtype)  # [n, k, width]
        at = torch.arange(chosen.numel(), dtype=torch.int32).view(chosen.shape).masked_fill_(chosen < 0, -1)
        parts.append(_run_native(q[first : first + block], rows, at, None, row_format.rank, scale, workspace // 2))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@operation(runs=cpu.runs_kernel, waits=True)
def sparse_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    row_format: LatentFormat,
    scale: float,
    counts: torch.Tensor | None = None,
    workspace: int = 256 << 20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to the rows in its slots.

    Args:
        q: ``[T, heads, width]`` absorbed queries, float32, float16 or bfloat16.
        pool: latent pool ``[pages, page_size, columns]`` in ``row_format``.
        slots: ``[T, k]`` int32 rows of the flattened pool, unsorted is fine, −1 skipped.
        row_format: format of the pool; plain rows have q's dtype, and the first ``rank`` numbers of a row are its
            value.
        counts: ``[T]`` int32, the number of leading entries of each row of ``slots`` that count (k if not given); later
            entries may be anything.
        workspace: bytes for gathered rows (on a CPU, for those of one token at least) or for partial results (Triton's
            kernel, where few queries are split).

    Returns:
        out ``[T, heads, rank]`` in q's dtype; log-sum-exp ``[T, heads]`` float32 (natural logarithm).

    Raises:
        IndexError: on a CPU, slots outside of the pool.
    """
    check_queries(q, pool, row_format)
    if slots.dim() != 2 or slots.shape[0] != q.shape[0]:
        raise ValueError(f"slots must be [{q.shape[0]}, k], not {tuple(slots.shape)}")
    if slots.dtype != torch.int32:
        raise ValueError(f"slots must be int32, not {slots.dtype}")
    if counts is not None and counts.shape != (q.shape[0],):
        raise ValueError(f"counts must be [{q.shape[0]}], not {tuple(counts.shape)}")
    if runs_triton(q):
        slots, k = slots.contiguous(), slots.shape[1]
        inputs = slots, slots if counts is None else counts, k
        return launch_attention(
            sparse_attention_kernel, q.contiguous(), pool, row_format, inputs, k, scale, workspace,
            BLOCK_SCAN=max(16, next_power_of_2(k)), COUNTED=counts is not None,
        )  # fmt: skip
    if pool.stride(2) == 1 and cpu.serves(q, pool):
        return _run_native(q.contiguous(), pool, slots.contiguous(), counts, row_format.rank, scale, workspace)
    if is_batch_invariant() and len(q) and counts is None and cpu.serves(q):
        return _run_expanded(q.contiguous(), pool, slots, row_format, scale, workspace)
    block_bytes = min(workspace, _CPU_BLOCK_BYTES) if q.device.type == "cpu" else workspace
    return sparse_attention_reference(q, pool, slots, counts, row_format, scale, block_bytes)
