"""What the host must know of tokens that travel by node, against sums of Python."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.moe.way_numbers import way_numbers


@pytest.mark.parametrize(("size", "rounds", "rank"), [(1, 1, 0), (4, 1, 3), (6, 3, 2), (64, 2, 17)])
def test_way_numbers(size: int, rounds: int, rank: int, device: str) -> None:
    generator = torch.Generator().manual_seed(size)
    by_pair = torch.randint(50, (size, rounds, size, 4), generator=generator, dtype=torch.int32)
    takers = torch.randint(size, (size,), generator=generator, dtype=torch.int32)
    numbers = way_numbers(by_pair.to(device), rank, takers.to(device))
    assert numbers.dtype == torch.int32
    ranks, taken_by = range(size), takers.tolist()
    for number, row in enumerate(numbers.tolist()):
        rows, pairs, along, brought = by_pair[:, number].unbind(-1)
        wanted = [
            *(int(along[rank, t]) for t in ranks),
            *(int(along[f, rank]) for f in ranks),
            *(sum(int(rows[f, t]) for f in ranks if taken_by[f] == rank) for t in ranks),
            *(sum(int(rows[f, rank]) for f in ranks if taken_by[f] == g) for g in ranks),
            *(int(pairs[f, rank]) for f in ranks),
            *(max(sum(int(counts[f, t]) for f in ranks) for t in ranks) for counts in (pairs, brought)),
        ]
        assert row == wanted
