"""The slots of the candidates that are selected: those whose key is not below their row's threshold, side by side, so
that attention reads no other row.

Bits: exact.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.indexer._candidates import NONE_KEY
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_COLUMNS = 2048


def slots_above_reference(keys: torch.Tensor, slots: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    selected = slots.masked_fill(keys < thresholds[:, None], -1)
    return selected.gather(1, (selected < 0).int().sort(dim=1, stable=True).indices)


@kernel
def slots_above_kernel(keys, slots, thresholds, out, each, COLUMNS: tl.constexpr):
    """A row, COLUMNS candidates at a time."""
    first_of_row = tl.program_id(0).to(tl.int64) * each
    threshold = tl.load(thresholds + tl.program_id(0))
    done = each * 0
    for first in range(0, each, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        key = tl.load(keys + first_of_row + column, mask=column < each, other=NONE_KEY)
        slot = tl.load(slots + first_of_row + column, mask=column < each, other=-1)
        selected = ((key >= threshold) & (slot >= 0)).to(tl.int32)
        goal = done + tl.cumsum(selected) - selected
        tl.store(out + first_of_row + goal, slot, mask=selected > 0)
        done += tl.sum(selected)
    for first in range(0, each, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        tl.store(out + first_of_row + column, -1, mask=(column >= done) & (column < each))


@operation()
def slots_above(keys: torch.Tensor, slots: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Keeps the slots of the candidates that reach their row's threshold.

    Args:
        keys, slots: int64 and int32 ``[rows, k]``, as :func:`.lightning_indexer.lightning_indexer` gives them: the slot
            of no candidate is −1.
        thresholds: int64 ``[rows]``, of :func:`nth_largest`.

    Returns:
        int32 ``[rows, k]``, in the order given, −1 after the last.
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
        slots_above_kernel[(rows,)](
            keys.contiguous(), slots.contiguous(), thresholds.contiguous(), out, each, COLUMNS=columns
        )
    return out
