"""Dense causal attention over expanded (un-absorbed) keys and values, for one run of queries.

    out[i, h] = softmax(scale · q[i, h] · k[0 … S−n+i, h]ᵀ) · v[0 … S−n+i, h]

The n queries are the last n of the S tokens (the causal mask is aligned at the bottom right).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # optional: PyTorch's attention does the same
    flash_attn_varlen_func = None


def dense_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, workspace: int
) -> torch.Tensor:
    count, heads, _ = q.shape
    total = k.shape[0]
    # PyTorch's fused attention wants keys and values of one width, and makes all S² scores where they differ.
    value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    queries, keys, values = (_widened(t, width).transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # [1, heads, n, width]
    if count == total:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
        return out[0, ..., :value_dim].transpose(0, 1)
    out = torch.empty(count, heads, value_dim, dtype=q.dtype, device=q.device)
    # PyTorch aligns its causal mask at the top left; with a prefix the mask is made here, block by block.
    block = max(1, workspace // (8 * heads * total))
    for first in range(0, count, block):
        last = min(first + block, count)
        seen = total - count + last
        mask = torch.ones(last - first, seen, dtype=torch.bool, device=q.device).tril_(seen - (last - first))
        part = F.scaled_dot_product_attention(
            queries[:, :, first:last], keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, scale=scale
        )
        out[first:last] = part[0, ..., :value_dim].transpose(0, 1)
    return out


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """``x [..., dim]`` with zeros up to ``width``: they add nothing to a score, nor to a result's first columns."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    padded = _widened(v, q.shape[-1])  # FlashAttention-2 wants values as wide as the keys
    limits = [torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (q.shape[0], k.shape[0])]
    out = flash_attn_varlen_func(
        q, k, padded, limits[0], limits[1], q.shape[0], k.shape[0], softmax_scale=scale, causal=True
    )
    return out[..., : v.shape[-1]]


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, workspace: int = 256 << 20
) -> torch.Tensor:
    """Attention of the last n of S tokens: flash-attn where it is installed and fits, else PyTorch's own.

    Args:
        q: ``[n, heads, dim]``.
        k: ``[S, heads, dim]``, S ≥ n.
        v: ``[S, heads, value_dim]``.
        scale: softmax scale.
        workspace: bytes that masks and scores may take; queries are taken in blocks where it would be more.

    Returns:
        ``[n, heads, value_dim]`` in q's dtype.
    """
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2] or q.shape[0] > k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    half_precision = q.dtype in (torch.float16, torch.bfloat16)
    fits_flash = q.is_cuda and half_precision and q.shape[-1] <= 256 and v.shape[-1] <= q.shape[-1]
    if flash_attn_varlen_func is not None and fits_flash:
        return _flash_attention(q, k, v, scale)
    return dense_attention_reference(q, k, v, scale, workspace)
