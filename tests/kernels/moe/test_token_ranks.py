"""The ranks that tokens go to, against sets and lists of Python."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.moe.token_ranks import TokenRanks, token_ranks


def check(result: TokenRanks, chosen: torch.Tensor, rank_of: torch.Tensor, size: int) -> None:
    """All but the counts."""
    ranks = [[-1 if e < 0 else int(rank_of[e]) for e in row] for row in chosen.tolist()]
    pairs = [(r, t, j) for t, row in enumerate(ranks) for j, r in enumerate(row)]
    rows = sorted((r, t, j) for r, t, j in pairs if r >= 0 and r not in ranks[t][:j])
    assert all(part is None or part.dtype == torch.int32 for part in result)
    assert result.ranks.tolist() == ranks
    assert result.tokens.tolist() == [t for _, t, _ in rows] + [t for r, t, j in pairs if (r, t, j) not in set(rows)]
    assert result.row_ends.tolist() == [sum(r <= end for r, _, _ in rows) for end in range(size)]
    row_of = {(t, j): row for row, (_, t, j) in enumerate(rows)}
    assert result.pair_rows.flatten().tolist() == [row_of.get((t, j), -1) for _, t, j in pairs]


def counts_of(chosen: torch.Tensor, rank_of: torch.Tensor, size: int) -> list[list[int]]:
    ranks = [[int(rank_of[e]) for e in row if e >= 0] for row in chosen.tolist()]
    return [[sum(r in row for row in ranks), sum(row.count(r) for row in ranks)] for r in range(size)]


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "size"),
    [(1, 1, 1, 1), (37, 8, 24, 5), (130, 3, 130, 130), (600, 6, 8, 2), (0, 8, 8, 4), (5, 0, 4, 2), (70, 17, 40, 9)],
)
@pytest.mark.parametrize("no_expert", [0.0, 0.4, 1.0])
def test_token_ranks(tokens: int, k: int, experts: int, size: int, no_expert: float, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rank_of = torch.arange(size).repeat_interleave(experts // size + 1)[torch.randperm(experts, generator=generator)]
    chosen = torch.randint(experts, (tokens, k), generator=generator, dtype=torch.int32)
    chosen[torch.rand(tokens, k, generator=generator) < no_expert] = -1
    result = token_ranks(chosen.to(device), rank_of.int().to(device), size)
    check(result, chosen, rank_of, size)
    assert result.counts is not None and result.counts.tolist() == counts_of(chosen, rank_of, size)
    assert result.counts.is_contiguous(), "it is what travels"


def test_a_column_of_a_wider_matrix(device: str) -> None:
    experts = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    rank_of = torch.tensor([0, 0, 1, 1] * 3, dtype=torch.int32, device=device)
    assert token_ranks(experts[:, 1:3], rank_of, 2).pair_rows.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_two_tables_at_once(device: str) -> None:
    """The counts of both side by side, the rows of the last; and without counts."""
    experts = torch.tensor([[3, 0, -1], [1, 2, 3], [0, 0, 2]], dtype=torch.int32, device=device)
    tables = torch.tensor([[0, 0, 1, 2], [2, 1, 2, -1]], dtype=torch.int32, device=device)
    for counted in (True, False):
        both = token_ranks(experts, tables, 3, counted)
        check(both, experts, tables[1], 3)
        each = [counts_of(experts, table, 3) for table in tables]
        wanted = [one + other for one, other in zip(*each, strict=True)]
        assert (None if both.counts is None else both.counts.tolist()) == (wanted if counted else None)
