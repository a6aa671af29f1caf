"""Kernels of other libraries for the same operations, used if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from kernel_cases.inputs import Inputs

Call = Callable[[], object]


def peer_sparse_attention(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, value_dim: int, scale: float
) -> dict[str, Call]:
    """FlashMLA's sparse prefill, over the same bf16 rows."""
    if not find_spec("flash_mla"):
        return {}
    flash_mla = import_module("flash_mla")
    rows = pool.flatten(0, 1)[:, None]  # [S, 1, width]
    indices = slots[:, None]  # [T, 1, k]
    return {"FlashMLA": lambda: flash_mla.flash_mla_sparse_fwd(q, rows, indices, scale, value_dim)}


def peer_indexer_scores(make: Inputs, q: torch.Tensor, weights: torch.Tensor, context: int) -> dict[str, Call]:
    """DeepGEMM's FP8 scores of a prefill, over contiguous keys."""
    if not find_spec("deep_gemm"):
        return {}
    deep_gemm = import_module("deep_gemm")
    keys = make.fp8(context, q.shape[-1])
    scales = torch.ones(context, device=q.device)
    count = q.shape[0]
    begin = torch.zeros(count, dtype=torch.int32, device=q.device)
    end = torch.arange(context - count + 1, context + 1, dtype=torch.int32, device=q.device)
    return {"DeepGEMM": lambda: deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, begin, end)}
