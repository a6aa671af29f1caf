"""What the operations refuse: a small call of each (``operation_cases``), of which one argument is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import index_key_format, latent_format
from dsa_engine.kernels.rows.segment import CuSeqlens, Paging, Segment, Segments
from dsa_engine.kernels.runtime.operation import OPERATIONS
from operation_cases import BF16, CASES, Make, T

Change = Callable[[Any], Any]


def rows(count: int) -> Change:
    return lambda x: x[:count]


def columns(count: int) -> Change:
    return lambda x: x[..., :count]


def to(dtype: torch.dtype) -> Change:
    return lambda x: x.to(dtype)


def set_to(value: Any) -> Change:
    return lambda _: value


def part(number: int, change: Change) -> Change:
    """A change of one part of a weight."""
    return lambda parts: (*parts[:number], change(parts[number]), *parts[number + 1 :])


def segment(*about: int) -> Change:
    return lambda _: Segments.of([Segment(*about)])


F32, F64, HALF, I64 = torch.float32, torch.float64, torch.float16, torch.int64
_APART = torch.ones(40, 16, 400, dtype=BF16)[..., :144]  # rows of a page that are not next to each other

REFUSED: dict[str, list[tuple[str, Change, str]]] = {
    "add_rms_norm": [
        ("residual", rows(1), r"residual \(1, 128\)"),
        ("also", set_to(torch.ones(1, 128)), r"x \(60, 128\) \+ \(1, 128\)"),
    ],
    "apply_rope": [
        ("x", columns(6), r"x \(60, 2, 6\) does not fit cos \(60, 8\)"),
        ("out", set_to(torch.ones(3, 1, 8)), r"out \(3, 1, 8\)"),
        ("sin", to(F64), "float32, not torch.float32 and torch.float64"),
        ("cos", lambda x: x.t().contiguous().t(), "cos and sin must be contiguous"),
    ],
    "block_scaled_linear": [
        ("x", columns(127), r"x \(60, 127\)"),
        ("weight", to(F32), "float8_e4m3fn weights and float32 scales"),
        ("weight_scale", rows(1), r"must be \[2, 1\], not \[1, 1\]"),
    ],
    "choose_replicas": [
        ("topk_ids", to(I64), r"not torch.int64 \(60, 4\)"),
        ("replicas", columns(1), r"torch.int32 \(8, 1\)"),
    ],
    "combine": [
        ("topk_weights", columns(1), r"topk_weights \(60, 1\)"),
        ("pair_rows", to(I64), "pair_rows must be int32 and topk_weights float32, not torch.int64"),
    ],
    "combine_codes": [
        ("hidden", set_to(256), "rows of 256"),
        ("pair_rows", to(I64), "pair_rows must be int32"),
    ],
    "dense_attention": [
        ("cu_seqlens_q", set_to(CuSeqlens.of([60])), "1 sequences of 60 queries and 2 of 60 keys"),
        ("cu_seqlens_k", set_to(CuSeqlens.of([10, 50])), "a sequence has more queries than tokens"),
        ("out", set_to(torch.ones(3, 2, 16)), r"\[60, 2, 16\] in torch.bfloat16"),
    ],
    "dense_mla": [
        ("q", columns(143), "does not fit rows of PlainLatents"),
        ("q", to(HALF), "torch.float16"),
        ("q", rows(29), "60 rows, the batch has 29"),
        ("block_tables", columns(2), "token 60, its block table holds 2 pages of 16"),
    ],
    "dequantize_blocks": [
        ("scale_inv", rows(1), r"scale_inv must be \[2, 2\].*not \[1, 2\]"),
        ("start", set_to((-2, 0)), "start"),
        ("scale_inv", to(BF16), "float32 scales"),
    ],
    "expert_mlp": [
        ("topk_weights", columns(3), r"topk_weights \(60, 3\)"),
        ("down", part(0, columns(63)), r"gate_up \(8, 128, 128\), down \(8, 128, 63\)"),
    ],
    "expert_mlp, FP8": [
        ("topk_weights", columns(3), r"topk_weights \(60, 3\)"),
        ("x", columns(127), r"x \(60, 127\), gate_up"),
        ("down", part(1, lambda x: x[..., 0]), r"\[8, 128, 128\] must be \[8, 1, 1\], not \[8, 1\]"),
    ],
    "expert_mlp, INT4": [("down", part(0, columns(8)), r"gate_up \(8, 256, 16\), down \(8, 128, 8\)")],
    "expert_mlp, INT8": [("down", part(0, columns(63)), r"gate_up \(8, 128, 128\), down \(8, 128, 63\)")],
    "expert_order": [
        ("topk_ids", to(I64), "int32.*not torch.int64"),
        ("count", set_to(0), "0 experts"),
    ],
    "expand_latents": [
        ("pool", columns(163), r"\[pages, page_size, 164\], not torch.uint8 \[4, 16, 163\]"),
        ("pool", to(F32), "not torch.float32"),
    ],
    "fetch_rows": [
        ("host", columns(7), r"rows of torch.bfloat16 \[20, 16, 7\] do not fit a pool"),
        ("rows", rows(3), r"rows \[3, 1\] and slots \[60, 1\] must be int32"),
        ("slots", to(I64), "must be int32"),
    ],
    "gather_latent": [
        ("pool", columns(163), r"\[pages, page_size, 164\], not torch.uint8 \[4, 16, 163\]"),
        ("pool", to(F32), "not torch.float32"),
        ("row_format", set_to(latent_format(128, 36, torch.uint8)), "gathered in their dtype torch.uint8, not in"),
    ],
    "indexer_scores": [
        ("weights", columns(2), r"weights \(60, 2\)"),
        ("q", columns(31), "do not fit together"),
        ("pool", to(torch.uint8), "not torch.bfloat16, torch.uint8 and torch.float32"),
        ("weights", to(F64), "weights float32"),
        ("pool", lambda x: x.mT.contiguous().mT, "rows of a page must be contiguous"),
    ],
    "lightning_indexer": [
        ("segments", segment(0, 61, 0, 0), "61 rows, the batch has 60"),
        ("segments", segment(0, T, 1, 0), "block table with 1 rows"),
        ("segments", segment(0, T, 0, 10), "token 70, its block table holds 4 pages of 16"),
        ("k", set_to(0), "k must be at least 1, not 0"),
    ],
    "lightning_indexer, candidates": [
        ("page_index", columns(2), "a page_index, int32, shaped as their block tables"),
        ("keys", columns(4), r"int64 \[60, 16\], not torch.int64 \[60, 4\]"),
    ],
    "linear": [("x", columns(4), r"x \(60, 4\) does not fit a weight \(64, 128\)")],
    "merge_splits": [
        ("partial_lse", columns(1), r"\(3, 60, 2, 64\) and \(3, 60, 1\)"),
        ("partial_lse", to(HALF), "log-sum-exp float32, not torch.float32 and torch.float16"),
    ],
    "nth_largest": [
        ("keys", to(F64), r"int64 \[parts, rows, n\], not torch.float64"),
        ("k", set_to(0), "k must be at least 1, not 0"),
    ],
    "pack_tokens": [
        ("tokens", to(F64), "at most 4 bytes"),
        ("rows", set_to(2), "60 tokens do not fit in 2 rows"),
    ],
    "per_head_matmul": [("weight", lambda x: x[:, :5], r"weight \(2, 5, 32\), out \(60, 2, 32\)")],
    "quantize_index_queries": [
        ("q", columns(24), "queries of 24 numbers do not fit keys of FP8IndexKeys"),
        ("q", columns(8), "16 rotated columns do not fit queries of 8"),
        ("cos", rows(2), r"must both be \[60, dim / 2\]"),
        ("weights", columns(1), r"float32 \[60, 2\].* torch.float32 \[60, 1\]"),
    ],
    "quantize_rows": [("block", set_to(size), f"power of two, not {size}") for size in (0, 3, 96, -128)],
    "quantize_rows_int8": [
        ("largest", set_to(torch.ones(2)), r"\[60, 128\] and largest \[2\]"),
    ],
    "quantized_linear, INT4": [
        ("weight", part(0, lambda x: x.view(torch.uint8)), "int32 with floating-point scales, not torch.uint8"),
        ("x", columns(56), r"x \(60, 56\), weight \(1, 64, 16\)"),
        ("weight", part(1, lambda x: x.repeat(1, 8)), "groups of 16"),
    ],
    "quantized_linear, INT8": [
        ("weight", part(0, to(F32)), "codes must be int8, not torch.int8 and torch.float32"),
        ("weight", part(1, to(F64)), "scales must be float32, not torch.float32 and torch.float64"),
        ("x", columns(31), r"x \(60, 31\), its scales \(60,\), weight \(1, 64, 128\)"),
    ],
    "resolve_rows": [
        ("sets", rows(7), r"sets \[7\] \[requests\]"),
        ("stamp", columns(7), r"stamp \[61, 7\]"),
        ("row_of", to(I64), "must be int32, and of_set int64"),
        ("slots", lambda x: x.repeat(2, 1), "24 hot rows of a request are fewer than it may select in a step, 2 · 16"),
    ],
    "rms_norm": [("weight", columns(5), "x has width 128, the weight has 5")],
    "route": [
        ("bias", rows(7), r"bias \(7,\)"),
        ("bias", to(F64), "bias torch.float64"),
        ("logits", to(BF16), "logits torch.bfloat16"),
        ("groups", set_to(3), "3 groups"),
        ("top_k", set_to(5), "top 5 experts within top 2 of 4 groups of 2"),
    ],
    "select_topk": [
        ("scores", to(F64), r"not torch.float64 \(60, 64\)"),
        ("k", set_to(0), "k must be at least 1, not 0"),
        ("lengths", set_to(torch.zeros(3, dtype=torch.int32)), r"lengths must be \[60\]"),
        ("paging", set_to(Paging(torch.zeros(1, 4), torch.zeros(3), 16)), r"60 rows of scores, but \(3,\)"),
    ],
    "silu_mul": [("gate_up", columns(127), "even width, not 127")],
    "slots_above": [
        ("slots", columns(2), r"slots \[60, 2\]"),
        ("slots", to(I64), "int32, not torch.int64, torch.int64 and torch.int64"),
    ],
    "slots_of": [("sequences", rows(2), "60 rows of positions, but 2")],
    "sparse_attention": [
        ("q", columns(143), "does not fit rows of PlainLatents"),
        ("pool", to(HALF), r"\[pages, page_size, 144\], not torch.float16"),
        ("slots", rows(3), r"slots must be \[60, k\], not \(3, 16\)"),
        ("slots", lambda x: x[:, None], r"slots must be \[60, k\], not \(60, 1, 16\)"),
        ("slots", to(I64), "slots must be int32, not torch.int64"),
        ("counts", set_to(torch.ones(3)), r"counts must be \[60\], not \(3,\)"),
        ("row_format", set_to(latent_format(0, 144, BF16)), "rank=0"),
    ],
    "sparse_attention, FP8": [("pool", columns(163), r"\[pages, page_size, 164\], not torch.uint8 \[4, 16, 163\]")],
    "store_cache_rows": [
        ("rows", columns(175), r"rows \(60, 175\)"),
        ("slots", rows(4), r"60 rows need as many slots, not \[4\]"),
    ],
    "store_index_keys": [
        ("norm_weight", rows(23), r"weight \(23,\) and bias \(32,\) must be \[32\]"),
        ("cos", rows(2), r"must both be \[60, dim / 2\]"),
        ("slots", rows(2), r"60 rows need as many slots, not \[2\]"),
        ("slots", set_to(None), r"without slots the rows go to a buffer \[60, 32\]"),
        ("key_format", set_to(index_key_format(16, BF16)), "keys of 32 numbers in torch.bfloat16"),
    ],
    "store_latent": [
        ("compressed", columns(143), r"compressed \(60, 143\).*128 norm weights and 16"),
        ("cos", rows(2), r"must both be \[60, dim / 2\]"),
        ("slots", rows(2), r"60 rows need as many slots, not \[2\]"),
        ("slots", to(F32), "slots must be int32 or int64, not torch.float32"),
        ("out", columns(143), r"\[pages, page_size, 144\], not \[40, 16, 143\]"),
        ("slots", set_to(None), r"without slots the rows go to a buffer \[60, 144\]"),
        ("out", set_to(_APART), "rows of a page must be contiguous"),
        ("row_format", set_to(latent_format(128, 16, HALF)), r"rows of 128 \+ 16 numbers in torch.bfloat16"),
    ],
    "store_latent, FP8": [
        ("out", lambda x: torch.ones(40, 1, 166, dtype=x.dtype)[..., :164], "4 bytes; the row stride is 166")
    ],
    "store_rows": [
        ("rows", rows(2), r"\(2, 32\) rows do not fit 60 slots"),
        ("slots", to(F32), "slots must be int32 or int64, not torch.float32"),
    ],
    "token_ranks": [
        ("topk_ids", to(I64), r"not torch.int64 \(60, 4\)"),
        ("size", set_to(0), "not to 0"),
    ],
}


@pytest.mark.parametrize(
    ("name", "argument", "change", "message"),
    [(name, *row) for name, refused in REFUSED.items() for row in refused],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(name: str, argument: str, change: Change, message: str) -> None:
    args, kwargs = CASES[name](Make())
    run = OPERATIONS[name.partition(",")[0]].run
    given = inspect.signature(run).bind(*args, **kwargs)
    given.apply_defaults()
    given.arguments[argument] = change(given.arguments[argument])
    with pytest.raises((TypeError, ValueError), match=message):
        run(*given.args, **given.kwargs)


def test_every_operation_is_here() -> None:
    assert {name.partition(",")[0] for name in CASES} == {name.partition(",")[0] for name in REFUSED}
