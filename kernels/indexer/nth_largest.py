"""The k-th largest of a row's candidate keys (:mod:`._candidates`), those of all ranks that hold its pages: the
threshold of what is selected.

Bits: exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.indexer._candidates import NONE, NONE_KEY
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Keys of a row that its program holds in registers: 32 for each of 512 threads, those of 8 ranks with 2,048 each.
_HELD = 16_384
_LARGEST = tl.constexpr(2**63 - 1)
# Rows of a group of ranks whose candidates may go to all of them, which then find all thresholds: 115 KB more for a row
# and 8 ranks take less time than a further exchange.
FEW_ROWS = 40


def nth_largest_reference(keys: torch.Tensor, k: int) -> torch.Tensor:
    parts, rows, each = keys.shape
    if k > parts * each:
        return keys.new_full((rows,), NONE)
    return keys.transpose(0, 1).reshape(rows, -1).kthvalue(parts * each - k + 1, dim=1).values


@triton.jit
def _load_keys(keys, row, first, rows, EACH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The keys ``first … first + BLOCK - 1`` of a row, NONE after the last."""
    entry = first + tl.arange(0, BLOCK)
    part, column = entry // EACH, entry % EACH
    return tl.load(keys + (part.to(tl.int64) * rows + row) * EACH + column, mask=entry < COUNT, other=NONE_KEY)


@kernel(do_not_specialize=["rows"])
def nth_largest_kernel(keys, thresholds, rows, k, EACH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """A row: the range that the key lies in is halved until exactly k keys are in or above it. Its first BLOCK keys
    stay in registers, others are read again at each step."""
    row = tl.program_id(0).to(tl.int64)
    values = _load_keys(keys, row, 0, rows, EACH, COUNT, BLOCK)
    reach, high = tl.sum((values > NONE_KEY).to(tl.int32)), tl.max(values)
    low = tl.min(tl.where(values > NONE_KEY, values, _LARGEST))
    for first in range(BLOCK, COUNT, BLOCK):
        others = _load_keys(keys, row, first, rows, EACH, COUNT, BLOCK)
        reach, high = reach + tl.sum((others > NONE_KEY).to(tl.int32)), tl.maximum(high, tl.max(others))
        low = tl.minimum(low, tl.min(tl.where(others > NONE_KEY, others, _LARGEST)))
    enough = reach >= k
    while enough & (reach != k) & (low < high):  # at least k keys reach low, fewer what is above high
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        above = tl.sum((values >= middle).to(tl.int32))
        for first in range(BLOCK, COUNT, BLOCK):
            others = _load_keys(keys, row, first, rows, EACH, COUNT, BLOCK)
            above += tl.sum((others >= middle).to(tl.int32))
        low, reach = tl.where(above >= k, middle, low), tl.where(above >= k, above, reach)
        high = tl.where(above >= k, high, middle - 1)
    least = tl.min(tl.where(values >= low, values, _LARGEST))
    for first in range(BLOCK, COUNT, BLOCK):
        others = _load_keys(keys, row, first, rows, EACH, COUNT, BLOCK)
        least = tl.minimum(least, tl.min(tl.where(others >= low, others, _LARGEST)))
    tl.store(thresholds + row, tl.where(enough, least, NONE_KEY))


@operation()
def nth_largest(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The k-th largest key of each row.

    Args:
        keys: int64 ``[parts, rows, n]``: candidate keys of each rank, as an exchange leaves them; a row's differ but
            for NONE.

    Returns:
        int64 ``[rows]``; NONE where a row has fewer than k candidates.
    """
    if keys.dim() != 3 or keys.dtype != torch.int64 or not keys.shape[0] * keys.shape[2]:
        raise ValueError(f"keys must be int64 [parts, rows, n], not {keys.dtype} {list(keys.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if not runs_triton(keys):
        return nth_largest_reference(keys, k)
    parts, rows, each = keys.shape
    thresholds = torch.empty(rows, dtype=torch.int64, device=keys.device)
    if rows:
        block = next_power_of_2(parts * each)
        if block > _HELD:
            block = _HELD // 4
        nth_largest_kernel[(rows,)](
            keys.contiguous(), thresholds, rows, k, EACH=each, COUNT=parts * each, BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return thresholds
