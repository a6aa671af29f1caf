"""flash-attn 2.8.3, and FlashAttention-3 at commit 0251105a."""

from __future__ import annotations

from typing import Any

import torch

from library_stubs.checks import BF16, I32, has_no_values, need, stub, tensor


def _varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, scale: Any, causal: bool) -> Any:
    tensor("q", q, (BF16, torch.float16), None, None, None)
    tensor("k", k, q.dtype, None, q.shape[1], q.shape[2])
    tensor("v", v, q.dtype, k.shape[0], q.shape[1], None)
    need(q.shape[2] <= 256 and q.shape[2] % 8 == v.shape[2] % 8 == 0, "sizes of heads")
    tensor("cu_seqlens_q", cu_q, I32, None, contiguous=True)
    tensor("cu_seqlens_k", cu_k, I32, cu_q.shape[0], contiguous=True)
    need(isinstance(max_q, int) and isinstance(max_k, int) and causal, "lengths of the host; a causal mask")
    out = q.new_empty(*q.shape[:2], v.shape[2])
    if has_no_values(q):
        return out
    for (a, b), (c, d) in zip(zip(cu_q[:-1], cu_q[1:]), zip(cu_k[:-1], cu_k[1:])):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].double(), k[c:d].double()) * scale
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(int((d - c) - (b - a)) + 1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", weights, v[c:d].double()).to(q.dtype)
    return out


@stub
def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:  # fmt: skip
    need(v.shape[-1] == q.shape[-1] and dropout_p == 0.0, "version 2 takes values as wide as the keys")
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _varlen(*given, softmax_scale, causal)


@stub
def flash_attn_3_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Any = None, seqused_k: Any = None, softmax_scale: Any = None, causal: bool = False, qv: Any = None,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, window_size: Any = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: Any = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    apart = 128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128
    need(v.shape[-1] == q.shape[-1] or apart, f"values of {v.shape[-1]} beside keys of {q.shape[-1]}")
    given = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _varlen(*given, softmax_scale, causal)
