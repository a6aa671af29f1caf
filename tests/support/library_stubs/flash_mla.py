"""FlashMLA at commit 9241ae3e."""

from __future__ import annotations

from typing import Any

import torch

from library_stubs.checks import BF16, E4M3, F32, I32, U8, has_no_values, need, stub, tensor

SHARED_BYTES = 232_448  # a block has this many on sm_90


def _attend(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [T, heads, 576]`` over ``rows [R, 576]``, both float64; a query without a slot: 0, and +inf."""
    chosen, outside = rows[slots.clamp(min=0).long()], slots < 0
    scores = (torch.einsum("thd,tkd->thk", q, chosen) * scale).masked_fill(outside[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("thk,tkd->thd", (scores - lse[..., None]).exp().nan_to_num(0.0), chosen[..., :512])
    return out.to(BF16), lse.float().masked_fill(lse == float("-inf"), float("inf"))


@stub
def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, attn_sink: Any = None, topk_length: Any = None
) -> Any:
    need(d_v == 512 and isinstance(sm_scale, float), f"d_v {d_v}, sm_scale {sm_scale}")
    tensor("q", q, BF16, None, None, 576)
    tensor("kv", kv, BF16, None, 1, 576)
    tensor("indices", indices, I32, q.shape[0], 1, None)
    need(q.shape[1] in (64, 128) and indices.shape[2] % 128 == 0 < indices.shape[2], "heads, or topk % 128")
    need(q.stride(1) * 2 % 16 == 0 and kv.stride(0) * 2 % 16 == 0, "TMA strides")
    need(attn_sink is None and topk_length is None, "not used here")
    heads = q.shape[:2]
    if has_no_values(q):
        return q.new_empty(*heads, 512), q.new_empty(*heads, dtype=F32), q.new_empty(*heads, dtype=F32)
    out, lse = _attend(q.double(), kv[:, 0].double(), indices[:, 0], sm_scale)
    return out, torch.zeros_like(lse), lse


class FlashMLASchedMeta:
    config: Any = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    return FlashMLASchedMeta(), None


@stub
def flash_mla_with_kvcache(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, tile_scheduler_metadata: Any,
    num_splits: None = None, softmax_scale: Any = None, causal: bool = False, is_fp8_kvcache: bool = False,
    indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices_in_kvcache: Any = None,
    topk_length: Any = None, extra_topk_length: Any = None,
) -> Any:  # fmt: skip
    need(isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None, "metadata")
    need(is_fp8_kvcache and not causal and head_dim_v == 512, "sparse attention is over FP8 rows, and not causal")
    need(topk_length is None and extra_k_cache is None and attn_sink is None, "not for V3.2's rows")
    tensor("q", q, BF16, None, None, None, 576)
    tensor("k_cache", k_cache, (E4M3, torch.int8, U8), None, None, 1, 656)
    need(k_cache.stride(1) == 656, "the rows of a page must be contiguous")
    tensor("indices", indices, I32, *q.shape[:2], None)
    need(q.shape[2] in (64, 128) and indices.shape[2] % 64 == 0 < indices.shape[2], "heads, or topk % 64")
    need(4 * (5 * q.shape[0] + 1) <= SHARED_BYTES, "the schedule is made in shared memory")
    config = (*q.shape[:3], *k_cache.shape[1:3], indices.shape[-1])
    need(tile_scheduler_metadata.config in (None, config), "metadata of another shape")
    tile_scheduler_metadata.config = config
    requests, queries, heads, _ = q.shape
    if has_no_values(q):
        return q.new_empty(*q.shape[:3], 512), q.new_empty(requests, queries, heads, dtype=F32).transpose(1, 2)
    packed = k_cache.reshape(-1, 656).view(U8)
    values = packed[:, :512].contiguous().view(E4M3).double().view(-1, 4, 128)
    values = values * packed[:, 512:528].contiguous().view(F32).double()[..., None]
    rows = torch.cat((values.flatten(1), packed[:, 528:].contiguous().view(BF16).double()), dim=1)
    out, lse = _attend(q.flatten(0, 1).double(), rows, indices.flatten(0, 1), softmax_scale)
    return out.view(*q.shape[:3], 512), lse.view(requests, queries, heads).transpose(1, 2)
