"""Latent rows of spilled pages from host memory to hot rows of the pool: what :mod:`.resolve_rows` has missed.

    pool[slots[i]] = host[rows[i]]

On CUDA the kernel reads the pinned memory itself, so that the host need not know what is missing.

Bits: rows are copied.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.rows.paged import copy_tile
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Rows that a program asks for at a time, and programs of a request: 64 rows of some 656 bytes are on their way.
_ROWS, _PROGRAMS, _WARPS = 4, 16, 4


def fetch_rows_reference(pool: torch.Tensor, host: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """In shapes that follow from no contents, so that a recording can repeat it: entries after a request's last repeat
    some pair, or write a row as it is where there is none."""
    wanted = rows.flatten() >= 0
    pair = torch.arange(len(wanted), device=wanted.device).where(wanted, wanted.int().argmax())
    source, target = (x.flatten().clamp(min=0)[pair] for x in (rows, slots))
    fetched = host.view(-1, host.shape[-1])[source.to(host.device)].to(pool.device)
    flat = pool.view(-1, pool.shape[-1])
    flat[target] = fetched.where(wanted.any(), flat[target])


@kernel(do_not_specialize=["each", "programs"])
def fetch_rows_kernel(
    pool, host, rows, slots, each, programs, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th tile of ROWS rows of a request, up to its last row."""
    first_of_all, first = tl.program_id(0).to(tl.int64) * each, tl.program_id(1) * ROWS
    entry = first + tl.arange(0, ROWS)
    row = tl.load(rows + first_of_all + entry, mask=entry < each, other=-1)
    while tl.max(row) >= 0:
        slot = tl.load(slots + first_of_all + entry, mask=row >= 0, other=0).to(tl.int64)[:, None]
        source = host + row.to(tl.int64)[:, None] * WIDTH
        copy_tile(source, pool + slot * WIDTH, (row >= 0)[:, None], WIDTH, PADDED)
        entry += programs * ROWS
        row = tl.load(rows + first_of_all + entry, mask=entry < each, other=-1)


@operation(writes=("pool",), waits=True)
def fetch_rows(pool: torch.Tensor, host: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Copies rows of host memory to the pool.

    Args:
        pool: ``[pages, page_size, columns]``, contiguous.
        host: the same of the spilled pages, in the same dtype; in pinned memory if the pool is on a GPU.
        rows: int32 ``[requests, n]``, rows of ``host``, −1 after the last of a request.
        slots: int32 ``[requests, n]``, the slot that each goes to. No slot is named twice.
    """
    if pool.shape[1:] != host.shape[1:] or pool.dtype != host.dtype or pool.dim() != 3:
        raise ValueError(
            f"rows of {host.dtype} {list(host.shape)} do not fit a pool of {pool.dtype} {list(pool.shape)}"
        )
    if rows.shape != slots.shape or rows.dim() != 2 or {rows.dtype, slots.dtype} != {torch.int32}:
        raise ValueError(f"rows {list(rows.shape)} and slots {list(slots.shape)} must be int32 [requests, n]")
    if not runs_triton(pool):
        fetch_rows_reference(pool, host, rows, slots)
    elif rows.numel():
        size = pool.shape[-1] * pool.itemsize
        word = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % kind.itemsize == 0)
        width, (requests, each) = size // word.itemsize, rows.shape
        programs = min(_PROGRAMS, cdiv(each, _ROWS))
        fetch_rows_kernel[(requests, programs)](
            pool.view(word), host.view(word), rows, slots, each, programs,
            WIDTH=width, PADDED=next_power_of_2(width), ROWS=_ROWS, num_warps=_WARPS,
        )  # fmt: skip
