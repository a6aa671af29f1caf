"""The ranks that tokens go to, against sets and lists of Python."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.moe.token_ranks import token_ranks


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "size"),
    [(1, 1, 1, 1), (37, 8, 24, 5), (130, 3, 130, 130), (300, 6, 8, 2), (0, 8, 8, 4), (5, 0, 4, 2)],
)
@pytest.mark.parametrize("no_expert", [0.0, 0.4, 1.0])
def test_token_ranks(tokens: int, k: int, experts: int, size: int, no_expert: float, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rank_of = torch.arange(size).repeat_interleave(experts // size + 1)[torch.randperm(experts, generator=generator)]
    chosen = torch.randint(experts, (tokens, k), generator=generator, dtype=torch.int32)
    chosen[torch.rand(tokens, k, generator=generator) < no_expert] = -1
    result = token_ranks(chosen.to(device), rank_of.int().to(device), size)
    ranks = [[-1 if e < 0 else int(rank_of[e]) for e in row] for row in chosen.tolist()]
    first = [[-1 if r in row[:j] else r for j, r in enumerate(row)] for row in ranks]
    assert all(part.dtype == torch.int32 for part in result)
    assert result.ranks.tolist() == ranks and result.first.tolist() == first
    goes, pair_ranks = ([r for row in table for r in row] for table in (first, ranks))
    assert result.counts.tolist() == [[goes.count(r), pair_ranks.count(r)] for r in range(size)]
    assert result.counts.is_contiguous(), "it is what travels"


def test_a_column_of_a_wider_matrix(device: str) -> None:
    experts = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    rank_of = torch.tensor([0, 0, 1, 1] * 3, dtype=torch.int32, device=device)
    assert token_ranks(experts[:, 1:3], rank_of, 2).first.tolist() == [[0, 1]] * 3


def test_two_tables_at_once(device: str) -> None:
    """As each by itself, their counts side by side; and without counts."""
    experts = torch.tensor([[3, 0, -1], [1, 2, 3], [0, 0, 2]], dtype=torch.int32, device=device)
    tables = torch.tensor([[0, 0, 1, 2], [2, 1, 2, 1]], dtype=torch.int32, device=device)
    both, each = token_ranks(experts, tables, 3), [token_ranks(experts, one, 3) for one in tables]
    for number, one in enumerate(each):
        assert both.ranks[number].equal(one.ranks) and both.first[number].equal(one.first)
        assert both.counts is not None and one.counts is not None
        assert both.counts[:, 2 * number : 2 * number + 2].equal(one.counts)
    uncounted = token_ranks(experts, tables, 3, counted=False)
    assert uncounted.counts is None and uncounted.first.equal(both.first) and uncounted.ranks.equal(both.ranks)
