"""What a rank must know of tokens that travel by node, out of what every rank has for every other.

by_pair[f, r, t] = (rows, pairs, rows along the rail, pairs along the rail)  from rank f to rank t in round r
inside[r, g, t]  = Σ rows[f, r, t] over the ranks f whose tokens rank g of the node takes: rows inside the node

out[r] = [along[rank, :], along[:, rank], inside[rank, :], inside[:, rank], pairs[:, rank],
          max_t Σ_f pairs[f, t], max_t Σ_f pairs along the rail[f, t]]

Bits: exact.
"""

from __future__ import annotations

import torch
import triton.language as tl

from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

_TILE = 2048  # pairs of ranks at a time; compiled for sm_90, not yet measured on a device


def way_numbers_reference(by_pair: torch.Tensor, rank: int, takers: torch.Tensor) -> torch.Tensor:
    rows, pairs, along, brought = by_pair.transpose(0, 1).unbind(dim=-1)
    inside = torch.zeros_like(rows).index_add_(1, takers, rows)
    largest = [counts.sum(dim=1, dtype=torch.int32).amax(dim=1, keepdim=True) for counts in (pairs, brought)]
    mine = (along[:, rank], along[:, :, rank], inside[:, rank], inside[:, :, rank], pairs[:, :, rank])
    return torch.cat((*mine, *largest), dim=1)


@kernel(do_not_specialize=["size", "rank"])
def way_numbers_kernel(by_pair, takers, out, size, rank, FROM: tl.constexpr, PADDED: tl.constexpr):
    """A round a program."""
    number, rounds = tl.program_id(0), tl.num_programs(0)
    out += number * (5 * size + 2)
    to = tl.arange(0, PADDED)
    passed = tl.zeros((PADDED,), tl.int32)  # by `to`: rows that this rank passes on
    taken = tl.zeros((PADDED,), tl.int32)  # by rank of the node: rows that it passes on to this one
    all_pairs = tl.zeros((PADDED,), tl.int32)
    all_brought = tl.zeros((PADDED,), tl.int32)
    for start in range(0, size, FROM):
        source = start + tl.arange(0, FROM)
        known = source < size
        at = by_pair + (source * rounds + number)[:, None] * size * 4 + to[None, :] * 4
        inside = known[:, None] & (to < size)[None, :]
        taker = tl.load(takers + source, mask=known, other=-1)
        rows = tl.load(at, mask=inside, other=0)
        passed += tl.sum(tl.where((taker == rank)[:, None], rows, 0), axis=0)
        all_pairs += tl.sum(tl.load(at + 1, mask=inside, other=0), axis=0)
        all_brought += tl.sum(tl.load(at + 3, mask=inside, other=0), axis=0)
        mine = by_pair + (source * rounds + number) * size * 4 + rank * 4
        to_me = tl.load(mine, mask=known, other=0)
        taken += tl.sum(tl.where(taker[:, None] == to[None, :], to_me[:, None], 0), axis=0)
        tl.store(out + size + source, tl.load(mine + 2, mask=known, other=0), mask=known)
        tl.store(out + 4 * size + source, tl.load(mine + 1, mask=known, other=0), mask=known)
    own = by_pair + (rank * rounds + number) * size * 4 + to * 4
    tl.store(out + to, tl.load(own + 2, mask=to < size, other=0), mask=to < size)
    tl.store(out + 2 * size + to, passed, mask=to < size)
    tl.store(out + 3 * size + to, taken, mask=to < size)
    tl.store(out + 5 * size, tl.max(all_pairs, axis=0))
    tl.store(out + 5 * size + 1, tl.max(all_brought, axis=0))


@operation()
def way_numbers(by_pair: torch.Tensor, rank: int, takers: torch.Tensor) -> torch.Tensor:
    """Finds the numbers of :class:`.placement.Way`, with no synchronisation of host and device.

    Args:
        by_pair: int32 ``[from, rounds, to, 4]``, :func:`.by_node.counts_in_rounds` of every rank.
        rank: this one.
        takers: int32 ``[ranks]``: the rank of this node that takes the tokens of each.

    Returns:
        int32 ``[rounds, 5 · ranks + 2]``.
    """
    size, rounds = by_pair.shape[0], by_pair.shape[1]
    if by_pair.shape != (size, rounds, size, 4) or takers.shape != (size,) or not 0 <= rank < size:
        raise ValueError(
            f"by_pair must be [ranks, rounds, ranks, 4], takers [ranks] and the rank one of them, not "
            f"{tuple(by_pair.shape)}, {tuple(takers.shape)} and {rank}"
        )
    if by_pair.dtype != torch.int32 or takers.dtype != torch.int32:
        raise ValueError(f"by_pair and takers must be int32, not {by_pair.dtype} and {takers.dtype}")
    if not runs_triton(by_pair):
        return way_numbers_reference(by_pair, rank, takers)
    out = torch.empty(rounds, 5 * size + 2, dtype=torch.int32, device=by_pair.device)
    padded = next_power_of_2(size)
    way_numbers_kernel[(rounds,)](
        by_pair.contiguous(), takers.contiguous(), out, size, rank,
        FROM=max(1, min(padded, _TILE // padded)), PADDED=padded, num_warps=4,
    )  # fmt: skip
    return out
