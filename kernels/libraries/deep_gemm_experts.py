"""DeepGEMM behind :func:`.expert_mlp.expert_mlp` of experts in FP8 blocks: ``m_grouped_fp8_gemm_nt_contiguous`` for
many rows, ``m_grouped_fp8_gemm_nt_masked`` for few.

Signatures of version 2.6.1 (commit 54e22612, June 2026); those of 2.1.1 are the same. Only on sm_90: from sm_100 on
scales must be powers of two. The rows of an expert begin at multiples of an alignment:

    contiguous   layout[row] = expert, −1 between the last row of an expert and the first of the next
    masked       rows [experts, size, in], and the number of rows of each expert

Between the products a value is bfloat16; our kernel keeps float32 until it quantises. A number near the middle of two
codes of e4m3 so gets the other one: results differ by 1.5% from ours, where quantising itself errs by 2.6%.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from dsa_engine.kernels.grouped.products import ProductFormat, Weight, codes_of
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.expert_order import expert_order
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import chip_of
from dsa_engine.kernels.runtime.libraries import FEW_ROWS, adapter

_BLOCK = 128  # the weights' scales have such blocks, and masked tiles such rows
_ALLOWANCE = 3.0  # 3%, where a kernel that keeps float32 is allowed 1%
_UNCOUNTED_PAIRS = 16384  # most pairs of which those of other ranks get rows too


def _takes(
    few: bool, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: Weight, down: Weight,
    product: ProductFormat | None = None, *, dtype: torch.dtype | None = None, local_fraction: float = 1.0,
    local_pairs: int | None = None, **_: Any,
) -> bool:  # fmt: skip
    weight = down[0]
    return (
        (x.shape[0] <= FEW_ROWS) == few
        and product is not None
        and weight is not None
        and weight.dtype == torch.float8_e4m3fn
        and (dtype or x.dtype) == torch.bfloat16
        and weight.shape[1] % _BLOCK == weight.shape[2] % _BLOCK == 0
        and (local_pairs is not None or local_fraction == 1 or topk_ids.numel() <= _UNCOUNTED_PAIRS)
        and chip_of(x).capability // 10 == 9
    )


def _experts(
    masked: bool, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: Weight, down: Weight,
    product: ProductFormat, *, first: int | None = None, local_pairs: int | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    library, count, device = import_module("deep_gemm"), codes_of(down).shape[0], x.device
    tokens, row_ends, pair_rows = expert_order(topk_ids, count, first)
    pairs = topk_ids.numel() if local_pairs is None else local_pairs
    sizes = row_ends.diff(prepend=row_ends.new_zeros(1))
    if masked:
        size = cdiv(x.shape[0], _BLOCK) * _BLOCK  # an expert has a row of each token at most
        rows, begins = count * size, torch.arange(0, count * size, size, dtype=torch.int32, device=device)
    else:
        size = library.get_mk_alignment_for_contiguous_layout()
        rows, padded = (pairs // size + count) * size, (sizes + (size - 1)) // size * size
        begins = (padded.cumsum(0) - padded).int()
    moved = begins - (row_ends - sizes)  # from the rows of an expert one after the other to those that it gets here

    at = torch.arange(rows, dtype=torch.int32, device=device)
    expert = torch.searchsorted(begins, at, right=True) - 1  # the last that begins there: others are empty
    source = at - moved[expert]
    inside = source < row_ends[expert]
    token = tokens[source.clamp_(max=len(tokens) - 1)]
    layout = sizes if masked else torch.where(inside, expert, -1).int()

    def multiply(operand: tuple[torch.Tensor, torch.Tensor], weight: Weight) -> torch.Tensor:
        codes, scales = codes_of(weight), weight[1]
        assert scales is not None
        codes, scales = codes.flatten(1, -2), scales.flatten(1, -2)
        out = operand[0].new_empty(rows, codes.shape[1], dtype=torch.bfloat16)
        if masked:
            operand = operand[0].unflatten(0, (count, size)), operand[1].unflatten(0, (count, size))
            expected = max(1, cdiv(pairs, count))
            into = out.unflatten(0, (count, size))
            library.m_grouped_fp8_gemm_nt_masked(operand, (codes, scales), into, layout, expected)
        else:
            library.m_grouped_fp8_gemm_nt_contiguous(operand, (codes, scales), out, layout)
        return out

    codes, scales = product.quantize(x)
    assert codes is not None and scales is not None
    words = codes.view(torch.int32).index_select(0, token).view(codes.dtype)
    gated = multiply((words, scales.index_select(0, token)), gate_up)
    half, half_scales = product.quantize(silu_mul(gated))
    del gated
    assert half is not None and half_scales is not None
    y = multiply((half, half_scales), down)
    of_pair = torch.searchsorted(row_ends, pair_rows, right=True, out_int32=True).clamp_(max=count - 1)
    far = torch.where(pair_rows < 0, -1, pair_rows + moved[of_pair])
    return combine(y, far, topk_weights)


for _few, _name in ((True, "DeepGEMM's masked experts"), (False, "DeepGEMM's grouped experts")):
    adapter("expert_mlp", _name, "deep_gemm", partial(_takes, _few), _ALLOWANCE)(partial(_experts, _few))
