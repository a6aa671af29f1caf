"""DeepGEMM 2.6.1, commit 54e22612."""

from __future__ import annotations

from typing import Any

import torch

from dsa_engine.kernels.runtime.integers import cdiv
from library_stubs.checks import BF16, E4M3, F32, I32, U8, has_no_values, need, stub, tensor

SMS, ALIGNMENT = 132, 128


def get_num_sms() -> int:
    return SMS


def get_mk_alignment_for_contiguous_layout() -> int:
    return ALIGNMENT


@stub
def get_paged_mqa_logits_metadata(context_lens: Any, block_kv: int, num_sms: int, indices: Any = None) -> Any:
    tensor("context_lens", context_lens, I32, None, None, contiguous=True)
    need((block_kv, num_sms) == (64, SMS) and indices is None, "pages of 64, all multiprocessors")
    return context_lens.new_empty(num_sms + 1, 2)


def _logits(q: Any, weights: Any, keys: Any, lengths: Any, width: int) -> Any:
    """``q [T, heads, 128]`` against ``keys [T, width, 128]``; NaN from each row's length on."""
    scores = torch.einsum("th,thk->tk", weights.double(), torch.einsum("thd,tkd->thk", q.double(), keys).relu())
    unwritten = torch.arange(width) >= lengths.view(-1, 1)
    return scores.float().masked_fill(unwritten, float("nan"))


def _index_queries(q: Any, weights: Any, rows: int) -> None:
    need(q.is_contiguous() and q.dtype == E4M3, "q")
    need(q.shape[-2] in (32, 64) and q.shape[-1] in (32, 64, 128), f"heads of q {list(q.shape)}")
    need(q.storage_offset() % 16 == 0, "q is not aligned")
    tensor("weights", weights, F32, rows, q.shape[-2], contiguous=True)


@stub
def fp8_paged_mqa_logits(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_table: Any, schedule_meta: Any, max_context_len: int,
    clean_logits: bool = False, indices: Any = None,
) -> Any:  # fmt: skip
    need(q.dim() == 4 and q.shape[1] in (1, 2), f"q is {list(q.shape)}")
    requests, queries, _, dim = q.shape
    _index_queries(q, weights, requests * queries)
    tensor("kv_cache", kv_cache, U8, None, 64, 1, dim + 4)
    need(kv_cache.stride(1) == dim + 4 and kv_cache.stride(0) % 16 == 0, "the rows of a page must be contiguous")
    tensor("context_lens", context_lens, I32, requests, queries, contiguous=True)
    tensor("block_table", block_table, I32, requests, None)
    tensor("schedule_meta", schedule_meta, I32, SMS + 1, 2, contiguous=True)
    need(not clean_logits and indices is None, "lengths of two dimensions are not cleaned")
    if has_no_values(q):
        width = cdiv(max_context_len, 256) * 256
        return q.new_empty(requests * queries, width, dtype=F32)[:, :max_context_len]
    pages = kv_cache.flatten(1)
    values = pages[:, : 64 * dim].contiguous().view(E4M3).double().view(-1, 64, dim)
    values = values * pages[:, 64 * dim :].contiguous().view(F32).double()[..., None]
    keys = values[block_table.clamp(min=0).long()].flatten(1, 2)[:, :max_context_len].repeat_interleave(queries, dim=0)
    return _logits(q.flatten(0, 1), weights, keys, context_lens, max_context_len)


@stub
def fp8_mqa_logits(
    q: Any, kv: Any, weights: Any, cu_seq_len_k_start: Any, cu_seq_len_k_end: Any, clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Any:  # fmt: skip
    need(q.dim() == 3, f"q is {list(q.shape)}")
    rows, _, dim = q.shape
    _index_queries(q, weights, rows)
    tensor("kv", kv[0], E4M3, None, dim, contiguous=True)
    tensor("scales of kv", kv[1], F32, kv[0].shape[0], contiguous=True)
    for name, x in (("cu_seq_len_k_start", cu_seq_len_k_start), ("cu_seq_len_k_end", cu_seq_len_k_end)):
        tensor(name, x, I32, rows, contiguous=True)
    need(max_seqlen_k > 0 and not clean_logits, "logits from each row's first key on are not cleaned")
    if has_no_values(q):
        return q.new_empty(rows, cdiv(max_seqlen_k, 256) * 256, dtype=F32)[:, :max_seqlen_k]
    at = cu_seq_len_k_start[:, None].long() + torch.arange(max_seqlen_k)
    keys = (kv[0].double() * kv[1].double()[:, None])[at.clamp(max=len(kv[0]) - 1)]
    return _logits(q, weights, keys, cu_seq_len_k_end - cu_seq_len_k_start, max_seqlen_k)


def _operand(name: str, pair: Any, block: int, *shape: int | None) -> None:
    tensor(name, pair[0], E4M3, *shape, contiguous=block > 1)  # rows of activations may lie apart
    rows, inner = pair[0].shape[-2:]
    need(inner % 128 == 0, f"{name}: {inner} is no multiple of 128")
    blocks = (*pair[0].shape[:-2], cdiv(rows, block), inner // 128)
    need(pair[1].dtype == F32 and pair[1].shape == blocks, f"scales of {name}: {pair[1].dtype} {list(pair[1].shape)}")
    need(pair[1].stride(-1) == 1 and pair[1].storage_offset() % 4 == 0, f"scales of {name}: {pair[1].stride()}")
    need(block == 1 or pair[1].is_contiguous(), f"scales of {name} are not contiguous")


def _numbers(pair: Any, block: int) -> Any:
    scales = pair[1].double().repeat_interleave(128, dim=-1)
    return pair[0].double() * (scales.repeat_interleave(block, dim=-2)[..., : pair[0].shape[-2], :])


@stub
def fp8_gemm_nt(
    a: Any,
    b: Any,
    d: Any,
    c: Any = None,
    recipe: Any = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    _operand("a", a, 1, None, None)
    _operand("b", b, 128, None, a[0].shape[1])
    tensor("d", d, (BF16, F32), a[0].shape[0], b[0].shape[0], contiguous=True)
    # Either is a launch that writes it.
    d.zero_() if has_no_values(d) else d.copy_(_numbers(a, 1) @ _numbers(b, 128).T)


@stub
def m_grouped_fp8_gemm_nt_contiguous(
    a: Any, b: Any, d: Any, grouped_layout: Any, recipe: Any = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    _operand("a", a, 1, None, None)
    _operand("b", b, 128, None, None, a[0].shape[1])
    tensor("d", d, BF16, a[0].shape[0], b[0].shape[1], contiguous=True)
    tensor("grouped_layout", grouped_layout, I32, a[0].shape[0], contiguous=True)
    if has_no_values(d):
        return
    for tile in range(0, len(d), ALIGNMENT):  # a tile has one group, that of its first row
        rows = slice(tile, tile + ALIGNMENT)
        groups = grouped_layout[rows]
        need(set(groups.tolist()) <= {int(groups[0]), -1}, "a tile has rows of two groups")
        d[rows] = (_numbers(a, 1)[rows] @ _numbers(b, 128)[int(groups[0])].T) if groups[0] >= 0 else float("nan")


@stub
def m_grouped_fp8_gemm_nt_masked(
    a: Any, b: Any, d: Any, masked_m: Any, expected_m: int, recipe: Any = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    _operand("a", a, 1, None, None, None)
    _operand("b", b, 128, a[0].shape[0], None, a[0].shape[2])
    tensor("d", d, BF16, *a[0].shape[:2], b[0].shape[1], contiguous=True)
    tensor("masked_m", masked_m, I32, a[0].shape[0], contiguous=True)
    need(isinstance(expected_m, int) and expected_m > 0 and a[0].shape[1] % 128 == 0, "rows of a group")
    if not has_no_values(d):
        d.fill_(float("nan"))
        for group, rows in enumerate(masked_m.tolist()):
            d[group, :rows] = _numbers(a, 1)[group, :rows] @ _numbers(b, 128)[group].T
