"""Which expert lies on which rank, and what a dispatch is told of it. Nothing here starts a process."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("experts", "ranks", "counts"),
    [
        (256, 64, [4] * 64),
        (256, 6, [43, 43, 43, 43, 42, 42]),
        (24, 5, [5, 5, 5, 5, 4]),
        (7, 7, [1] * 7),
        (5, 1, [5]),
    ],
)
def test_contiguous(experts: int, ranks: int, counts: list[int]) -> None:
    placement = ExpertPlacement.contiguous(experts, ranks, CPU)
    assert (placement.experts, placement.ranks) == (experts, ranks)
    assert [placement.count(rank) for rank in range(ranks)] == counts
    assert [expert for held in placement.held for expert in held] == list(range(experts))
    logical = torch.tensor([[0, experts - 1], [-1, experts // 2]], dtype=torch.int32)
    assert placement.to_physical(logical) is logical, "logical and physical numbers are the same: nothing is launched"


@pytest.mark.parametrize("experts, ranks", [(24, 5), (24, 4), (9, 9)])
def test_every_expert_is_served_once(experts: int, ranks: int) -> None:
    placement = ExpertPlacement.contiguous(experts, ranks, CPU)
    choices = torch.arange(-1, experts, dtype=torch.int32)
    rank_of = torch.cat((torch.tensor([-1]), placement.rank_of))  # expert −1 first
    for rank in range(ranks):
        local = placement.local(choices, rank)
        assert local.dtype == torch.int32
        assert torch.equal(local >= 0, rank_of == rank)
        assert local[local >= 0].tolist() == list(range(placement.count(rank)))


def test_any_order() -> None:
    """Expert 3 is heavy and alone on its rank."""
    placement = ExpertPlacement([[3], [0, 4, 1], [2]], CPU)
    logical = torch.tensor([[0, 1, 2], [3, 4, -1]], dtype=torch.int32)
    physical = placement.to_physical(logical)
    assert physical.dtype == torch.int32 and physical.tolist() == [[1, 3, 4], [0, 2, -1]]
    assert placement.rank_of.tolist() == [0, 1, 1, 1, 2]
    assert placement.local(physical, 1).tolist() == [[0, 2, -1], [-1, 1, -1]]
    for rank, held in enumerate(placement.held):
        own = placement.local(placement.to_physical(torch.tensor(held, dtype=torch.int32)), rank)
        assert own.tolist() == list(range(len(held))), "the order of the weights"


def test_one_rank_in_any_order() -> None:
    placement = ExpertPlacement([[2, 0, 1]], CPU)
    parallel = ExpertParallel(Group((0,), 0, None), placement)
    assert parallel.held == (2, 0, 1)
    tokens, experts = torch.randn(2, 4), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    dispatch = parallel.dispatch(tokens, experts, torch.rand(2, 2), "all_to_all", 2)
    here = dispatch.receive(0)
    assert here.experts.tolist() == [[1, 0], [2, -1]] and here.served_fraction == 1.0
    dispatch.send_back(0, tokens)
    assert dispatch.rounds == 1 and here.tokens is tokens and dispatch.combine() is tokens


@pytest.mark.parametrize("held", [[[0, 1], [1]], [[0], [2]], [[0, 1], []], [[0, -1]]])
def test_placements_that_cannot_be(held: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every expert lies on one rank, and every rank holds one"):
        ExpertPlacement(held, CPU)


def test_more_ranks_than_experts() -> None:
    with pytest.raises(ValueError, match="n_routed_experts 4 cannot be divided over 5 ranks: each holds at least one"):
        ExpertPlacement.contiguous(4, 5, CPU)


def test_layers_share_one_division() -> None:
    mesh = Mesh(ParallelConfig(), 0, 1, CPU)
    assert mesh.expert_parallel(12) is mesh.expert_parallel(12)
    assert mesh.expert_parallel(12).held == tuple(range(12))


@pytest.mark.parametrize("ranks", [3, 6])
def test_even_routing_adds_up_over_the_ranks(ranks: int) -> None:
    """Each rank serves as much as one sends, also where a rank's choices do not divide."""
    placement = ExpertPlacement.contiguous(24, ranks, CPU)
    choices = torch.zeros(7, 4, dtype=torch.int32)
    parts = [ExpertParallel(Group(tuple(range(ranks)), rank, None), placement) for rank in range(ranks)]
    for part in parts:
        part.even = True
    serving = torch.cat([placement.rank_of[part.to_physical(choices).long()] for part in parts])
    assert serving.flatten().bincount(minlength=ranks).tolist() == [28] * ranks
