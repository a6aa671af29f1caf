"""Dense causal attention over expanded keys and values (MHA form), for several sequences in one call.

    out[i, h] = softmax(scale · q[i, h] · k[0 … S−n+i, h]ᵀ) · v[0 … S−n+i, h]

The n queries of a sequence are the last n of its S tokens (the causal mask is aligned at the bottom right). Sequences
lie one after the other, as ``cu_seqlens`` say; each has its own keys, so two segments of a request's tokens, which
see different numbers of them, are two sequences with their keys given twice.

Bits of a row: they depend on the library that runs, and in PyTorch's on the shapes of the whole call; under
:func:`.launch.batch_invariance` this form is not used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.kernels.rows.segment import CuSeqlens
from dsa_engine.kernels.runtime.operation import operation


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, workspace: int, out: torch.Tensor) -> None:
    """One sequence; ``out [n, heads, value_dim]``."""
    count, heads, _ = q.shape
    total = k.shape[0]
    # PyTorch's fused attention wants keys and values of one width, and makes all S² scores where they differ.
    value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    # [1, heads, n, width]; zeros add nothing to a score, nor to a result's first columns.
    widened = [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v)]
    queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in widened)
    if count == total:
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        out.copy_(attended[0, ..., :value_dim].transpose(0, 1))
        return
    if q.is_cuda:  # a fused kernel that knows the mask: no scores, no mask in memory
        from torch.nn.attention.bias import causal_lower_right  # seconds, as it brings torch.compile along

        lower_right = causal_lower_right(count, total)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=lower_right, scale=scale)
        out.copy_(attended[0, ..., :value_dim].transpose(0, 1))
        return
    # On a CPU the mask is made here, block by block: PyTorch would make all of it.
    block = max(1, workspace // (8 * heads * total))
    for first in range(0, count, block):
        last = min(first + block, count)
        seen = total - count + last
        mask = torch.ones(last - first, seen, dtype=torch.bool, device=q.device).tril_(seen - (last - first))
        part = F.scaled_dot_product_attention(
            queries[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
        )
        out[first:last] = part[0, ..., :value_dim].transpose(0, 1)


@operation(writes=("out",), runs=lambda q: q.is_cuda)
def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    *,
    scale: float,
    workspace: int = 256 << 20,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last n of S tokens of every sequence: PyTorch's, sequence by sequence, or a library's
    (:mod:`dsa_engine.kernels.libraries.flash_attention`).

    Args:
        q: ``[T, heads, dim]``, T the queries of all sequences.
        k: ``[K, heads, dim]``, K the tokens that the last query of each sees, of all sequences.
        v: ``[K, heads, value_dim]``.
        cu_seqlens_q: the rows of q of each sequence.
        cu_seqlens_k: the rows of k and v of each sequence.
        workspace: bytes that masks and scores may take; queries are taken in blocks where it would be more.
        out: tensor for the result, of any strides; default: a new one.

    Returns:
        ``[T, heads, value_dim]`` in q's dtype.
    """
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if (cu_seqlens_q.rows, cu_seqlens_k.rows, len(cu_seqlens_q)) != (q.shape[0], k.shape[0], len(cu_seqlens_k)):
        raise ValueError(
            f"{len(cu_seqlens_q)} sequences of {cu_seqlens_q.rows} queries and {len(cu_seqlens_k)} of "
            f"{cu_seqlens_k.rows} keys do not fit together with q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if out is not None and (out.shape != (*q.shape[:2], v.shape[-1]) or out.dtype != q.dtype):
        raise ValueError(f"out is {[*q.shape[:2], v.shape[-1]]} in {q.dtype}, not {list(out.shape)} in {out.dtype}")
    if any(last - first > stop - start for (first, last), (start, stop) in zip(cu_seqlens_q, cu_seqlens_k)):
        raise ValueError("the queries and keys do not fit together: a sequence has more queries than tokens")
    if out is None:
        out = q.new_empty(*q.shape[:2], v.shape[-1])
    for (first, last), (first_key, last_key) in zip(cu_seqlens_q, cu_seqlens_k):
        keys, values = k[first_key:last_key], v[first_key:last_key]
        _attend(q[first:last], keys, values, scale, workspace, out[first:last])
    return out
