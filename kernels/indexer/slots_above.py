"""The slots of the candidates that are selected: those whose key is not below their row's threshold.

One launch in the place of PyTorch's two, in every layer.

Bits: exact.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_COLUMNS = 2048  # of a program


def slots_above_reference(keys: torch.Tensor, slots: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    return slots.masked_fill(keys < thresholds[:, None], -1)


@kernel
def slots_above_kernel(keys, slots, thresholds, out, each, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at, inside = row * each + column, column < each
    key, slot = tl.load(keys + at, mask=inside), tl.load(slots + at, mask=inside)
    tl.store(out + at, tl.where(key >= tl.load(thresholds + row), slot, -1), mask=inside)


@operation()
def slots_above(keys: torch.Tensor, slots: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Keeps the slots of the candidates that reach their row's threshold.

    Args:
        keys, slots: int64 and int32 ``[rows, k]``, as :func:`.lightning_indexer.lightning_indexer` gives them: the slot
            of no candidate is −1.
        thresholds: int64 ``[rows]``, of :func:`nth_largest`.

    Returns:
        int32 ``[rows, k]``, −1 in place of the others.
    """
    if keys.shape != slots.shape or keys.dim() != 2 or thresholds.shape != keys.shape[:1]:
        raise ValueError(
            f"keys {list(keys.shape)}, slots {list(slots.shape)} and thresholds {list(thresholds.shape)} must be "
            "[rows, k], the same, and [rows]"
        )
    if (keys.dtype, slots.dtype, thresholds.dtype) != (torch.int64, torch.int32, torch.int64):
        raise ValueError(f"keys and thresholds must be int64, slots int32, not {keys.dtype}, {thresholds.dtype} and "
                         f"{slots.dtype}")  # fmt: skip
    if not runs_triton(keys):
        return slots_above_reference(keys, slots, thresholds)
    (rows, each), out = keys.shape, torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    if out.numel():
        columns = min(_COLUMNS, next_power_of_2(each))
        slots_above_kernel[(rows, cdiv(each, columns))](
            keys.contiguous(), slots.contiguous(), thresholds.contiguous(), out, each, COLUMNS=columns
        )
    return out
