"""FlashAttention behind :func:`.dense_attention.dense_attention`.

Signatures of ``flash_attn_varlen_func`` in flash-attn 2.8.3, and in FlashAttention-3 (``flash_attn_interface``, commit
0251105a, August 2026), which on sm_90 takes values of 97 to 128 numbers beside keys of 129 to 192; version 2 takes
values as wide as the keys. Numbers of 2 bytes, keys of at most 256 numbers and a multiple of 8.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from dsa_engine.kernels.rows.segment import CuSeqlens
from dsa_engine.kernels.runtime.launch import chip_of
from dsa_engine.kernels.runtime.libraries import adapter


def _takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> bool:
    return (
        q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and v.shape[-1] <= q.shape[-1]
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and chip_of(q).capability >= 80
    )


def _takes_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> bool:
    return _takes(q, k, v) and chip_of(q).capability // 10 == 9 and v.shape[-1] % 8 == 0


@adapter("dense_attention", "FlashAttention-2", "flash_attn", _takes)
def by_version_2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: CuSeqlens, **how: Any) -> torch.Tensor:
    widened = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # zeros give zeros
    return _attend("flash_attn", q, k, widened, *lengths, value_dim=v.shape[-1], **how)


@adapter("dense_attention", "FlashAttention-3", "flash_attn_interface", _takes_3)
def by_version_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: CuSeqlens, **how: Any) -> torch.Tensor:
    takes_values = 128 < q.shape[-1] <= 192 and 96 < v.shape[-1] <= 128
    values = v if takes_values else F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    return _attend("flash_attn_interface", q, k, values, *lengths, value_dim=v.shape[-1], **how)


def _attend(
    module: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens, *,
    value_dim: int, scale: float, workspace: int = 0, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    attended = import_module(module).flash_attn_varlen_func(
        q, k, v, cu_seqlens_q.on_device, cu_seqlens_k.on_device, cu_seqlens_q.longest, cu_seqlens_k.longest,
        softmax_scale=scale, causal=True,
    )  # fmt: skip
    # Some builds of version 3 return the log-sum-exp too.
    attended = (attended[0] if isinstance(attended, tuple) else attended)[..., :value_dim]
    return attended if out is None else out.copy_(attended)
