"""The replicas of experts, against a loop over fractions of multiples of √2."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.moe.choose_replicas import choose_replicas


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "limit"), [(1, 1, 1, 1), (700, 8, 24, 5), (300, 3, 130, 65), (0, 8, 4, 2)]
)
@pytest.mark.parametrize("first", [0, 63])
def test_choose_replicas(tokens: int, k: int, experts: int, limit: int, first: int, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    counts = torch.randint(1, limit + 1, (experts,), generator=generator).tolist()
    numbers = iter(torch.randperm(sum(counts), generator=generator).tolist())
    replicas = [[next(numbers) for _ in range(count)] for count in counts]
    table = torch.full((experts, 1 + limit), -1, dtype=torch.int32)
    for expert, own in enumerate(replicas):
        table[expert, : 1 + len(own)] = torch.tensor([len(own), *own])
    chosen = torch.randint(-1, experts, (tokens, k), generator=generator, dtype=torch.int32)
    physical = choose_replicas(chosen.to(device), table.to(device), first)
    expected = [
        [-1 if e < 0 else replicas[e][int((first + t) * 2**0.5 % 1 * counts[e])] for e in row]
        for t, row in enumerate(chosen.tolist())
    ]
    assert physical.dtype == torch.int32 and physical.tolist() == expected
