"""FlashMLA behind :func:`.sparse_attention.sparse_attention`: plain rows by its sparse prefill, FP8 rows by its decode.

Signatures of commit 9241ae3e (April 2026), ``flash_mla_sparse_fwd`` and ``flash_mla_with_kvcache``; earlier ones want
the metadata's arguments and give base-2 logarithms, and are left out when they are tried. Both take bfloat16 queries of
64 or 128 heads over rows of 512 + 64 numbers, on sm_90 and sm_100; slot -1 attends to nothing.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.runtime.launch import chip_of
from dsa_engine.kernels.runtime.libraries import adapter

# Largest number of tokens whose schedule is reused: a few KB each, which depend on shapes alone.
_REUSED_TOKENS = 512
# Tokens of a call: the schedule is made in shared memory, 20 bytes a token; where it does not fit (from 11,623 on) the
# library ends the process.
_CALL_TOKENS = 8192
_schedules: dict[tuple[Any, ...], Any] = {}


def _takes(
    stored: torch.dtype, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *, row_format: LatentFormat,
    counts: torch.Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    return (
        (q.dtype, slots.dtype, counts) == (torch.bfloat16, torch.int32, None)
        and (row_format.dtype, row_format.rank, row_format.rope) == (stored, 512, 64)
        and q.shape[1] in (64, 128)
        and slots.shape[1] % 128 == 0 < slots.shape[1]  # the sparse prefill of sm_90; others take 64
        and pool.is_contiguous()
        and chip_of(q).capability // 10 in (9, 10)
    )


@adapter("sparse_attention", "FlashMLA's sparse prefill", "flash_mla", partial(_takes, torch.bfloat16))
def sparse_prefill(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *, row_format: LatentFormat, scale: float, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = pool.view(-1, 1, row_format.columns)
    forward = import_module("flash_mla").flash_mla_sparse_fwd
    out, _, lse = forward(q.contiguous(), rows, slots.contiguous()[:, None], sm_scale=scale, d_v=row_format.rank)
    return out, _of_nothing(lse)


@adapter("sparse_attention", "FlashMLA's sparse decode", "flash_mla", partial(_takes, FP8))
def sparse_decode(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, *, row_format: LatentFormat, scale: float,
    workspace: int = 256 << 20, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each token is a request of one query. Its float32 parts are one a token and one a multiprocessor at most: tokens
    are taken in pieces for which the workspace has room."""
    tokens, heads = q.shape[:2]
    step = min(max(1, workspace // (4 * heads * row_format.rank) - chip_of(q).multiprocessors), _CALL_TOKENS)
    parts = [
        _decode(q[first : first + step], pool, slots[first : first + step], row_format, scale)
        for first in range(0, tokens, step)
    ]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(each) for each in zip(*parts, strict=True))
    return out, _of_nothing(lse)


def _decode(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, row_format: LatentFormat, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    library = import_module("flash_mla")
    shape = (q.device, *q.shape, pool.shape[1], slots.shape[1])
    schedule = _schedules.get(shape)
    if schedule is None:
        schedule, _ = library.get_mla_metadata()
        # In a capture its numbers would only come to be with the replay.
        if q.shape[0] <= _REUSED_TOKENS and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            _schedules[shape] = schedule
    out, lse = library.flash_mla_with_kvcache(
        q.contiguous()[:, None], pool[:, :, None], None, None, row_format.rank, schedule, softmax_scale=scale,
        is_fp8_kvcache=True, indices=slots.contiguous()[:, None],
    )  # fmt: skip
    return out[:, 0], lse[:, :, 0]


def _of_nothing(lse: torch.Tensor) -> torch.Tensor:
    """A query without a slot has a log-sum-exp of +inf there, of -inf here."""
    return lse.nan_to_num_(nan=float("nan"), posinf=float("-inf"), neginf=float("-inf"))
