"""Which expert lies on which rank, and what a dispatch is told of it. Nothing here starts a process."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.moe.expert_order import local_topk_ids
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.experts.dispatch import Alone, Routed, StepSizes
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, contiguous
from dsa_engine.parallel.group import Group

CPU = torch.device("cpu")


def local(placement: ExpertPlacement, physical: torch.Tensor, rank: int) -> torch.Tensor:
    return local_topk_ids(physical, len(placement.held[rank]), placement.first[rank])


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
    placement = ExpertPlacement(contiguous(experts, ranks), CPU)
    assert (placement.experts, len(placement.held)) == (experts, ranks)
    assert [*map(len, placement.held)] == counts
    assert [expert for held in placement.held for expert in held] == list(range(experts))
    logical = torch.tensor([[0, experts - 1], [-1, experts // 2]], dtype=torch.int32)
    assert placement.to_physical(logical) is logical, "logical and physical numbers are the same: nothing is launched"


@pytest.mark.parametrize("experts, ranks", [(24, 5), (24, 4), (9, 9)])
def test_every_expert_is_served_once(experts: int, ranks: int) -> None:
    placement = ExpertPlacement(contiguous(experts, ranks), CPU)
    topk_ids = torch.arange(-1, experts, dtype=torch.int32)
    rank_of = torch.cat((torch.tensor([-1]), placement.rank_of))  # expert −1 first
    for rank in range(ranks):
        own = local(placement, topk_ids, rank)
        assert own.dtype == torch.int32
        assert torch.equal(own >= 0, rank_of == rank)
        assert own[own >= 0].tolist() == list(range(len(placement.held[rank])))


def test_any_order() -> None:
    """Expert 3 is heavy and alone on its rank."""
    placement = ExpertPlacement([[3], [0, 4, 1], [2]], CPU)
    logical = torch.tensor([[0, 1, 2], [3, 4, -1]], dtype=torch.int32)
    physical = placement.to_physical(logical)
    assert physical.dtype == torch.int32 and physical.tolist() == [[1, 3, 4], [0, 2, -1]]
    assert placement.rank_of.tolist() == [0, 1, 1, 1, 2]
    assert local(placement, physical, 1).tolist() == [[0, 2, -1], [-1, 1, -1]]
    for rank, held in enumerate(placement.held):
        own = local(placement, placement.to_physical(torch.tensor([held], dtype=torch.int32)), rank)
        assert own.tolist() == [list(range(len(held)))], "the order of the weights"


def test_one_rank_in_any_order() -> None:
    placement = ExpertPlacement([[2, 0, 1]], CPU)
    parallel = ExpertParallel(Group((0,), 0, None), placement)
    assert parallel.held == (2, 0, 1)
    tokens, experts = torch.randn(2, 4), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    dispatch = Alone().start(parallel, Routed(tokens, experts, torch.rand(2, 2)), StepSizes(2))
    here = dispatch.receive(0)
    assert here.topk_ids.tolist() == [[1, 0], [2, -1]] and here.local_fraction == 1.0
    dispatch.send_back(0, tokens)
    assert dispatch.rounds == 1 and here.tokens is tokens and dispatch.combine() is tokens


@pytest.mark.parametrize("held", [[[0], [2]], [[0, 1], []], [[0, -1]], []])
def test_placements_that_cannot_be(held: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="every expert lies on a rank, and every rank holds one"):
        ExpertPlacement(held, CPU)


def test_layers_share_one_division() -> None:
    mesh = Mesh(ParallelConfig(), 0, 1, CPU)
    assert mesh.experts.of_layer(12, 0) is mesh.experts.of_layer(12, 1)
    assert mesh.experts.of_layer(12, 0).held == tuple(range(12))


@pytest.mark.parametrize("ranks", [3, 6])
def test_even_routing_adds_up_over_the_ranks(ranks: int) -> None:
    """Each rank computes as many pairs as one sends, also where a rank's pairs do not divide."""
    placement = ExpertPlacement(contiguous(24, ranks), CPU)
    topk_ids = torch.zeros(7, 4, dtype=torch.int32)
    parts = [ExpertParallel(Group(tuple(range(ranks)), rank, None), placement) for rank in range(ranks)]
    for part in parts:
        part.even = True
    serving = torch.cat([placement.rank_of[part.to_physical(topk_ids).long()] for part in parts])
    assert serving.flatten().bincount(minlength=ranks).tolist() == [28] * ranks


HELD = [[3, 0], [0, 1, 3], [2, 0]]


def test_replicas_serve_equally_many() -> None:
    placement = ExpertPlacement(HELD, CPU)
    assert (placement.experts, placement.physical) == (4, 7)
    assert placement.replicas() == [[1, 2, 6], [3], [5], [0, 4]]
    parts = [ExpertParallel(Group((0, 1, 2), rank, None), placement) for rank in range(3)]
    assert [part.fraction for part in parts] == [2 / 7, 3 / 7, 2 / 7]
    logical = torch.tensor([[0, 3, 1, -1]], dtype=torch.int32).expand(60, 4)
    physical = placement.to_physical(logical)
    assert torch.equal(physical, placement.to_physical(logical)) and physical.dtype == torch.int32
    own = physical.t().tolist()
    assert all(abs(own[0].count(one) - 20) <= 2 for one in (1, 2, 6)), "three replicas"
    assert all(abs(own[1].count(one) - 30) <= 2 for one in (0, 4)), "two replicas"
    assert set(own[2]) == {3} and set(own[3]) == {-1}
    alternate = own[0][::3]
    assert all(abs(alternate.count(one) - 20 / 3) <= 2 for one in (1, 2, 6)), "also in every third row"


def test_one_row_of_each_rank_is_divided_too() -> None:
    """Decode: the ranks' numbers decide."""
    placement = ExpertPlacement([[0, 1], [0, 2]], CPU)
    group = tuple(range(8))
    row = torch.tensor([[0]], dtype=torch.int32)
    chosen = [int(ExpertParallel(Group(group, rank, None), placement).to_physical(row)) for rank in group]
    assert set(chosen) == {0, 2} and abs(chosen.count(0) - 4) <= 1


def test_a_placement_that_changes_in_place() -> None:
    """What a CUDA graph has read before stays where it is."""
    placement = ExpertPlacement([[0, 1], [2, 3, 3]], CPU, changes=True)
    logical = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)
    assert placement.to_physical(logical).tolist() == [[0, 1, 2, -1]]
    table, rank_of = placement._replicas, placement.rank_of
    placement.change([[3, 2], [1, 0, 0]])
    assert placement.held == ((3, 2), (1, 0, 0)) and placement.to_physical(logical)[0, 1:].tolist() == [2, 1, -1]
    assert placement._replicas is table and placement.rank_of is rank_of
    same = ExpertPlacement([[3, 2], [1, 0, 0]], CPU)
    many = torch.randint(-1, 4, (50, 3), dtype=torch.int32)
    assert torch.equal(placement.to_physical(many), same.to_physical(many))


@pytest.mark.parametrize("held", [[[0, 1, 2], [3, 3]], [[0, 1], [2, 2, 2]], [[0, 1], [2, 3, 4]]])
def test_changes_that_cannot_be(held: list[list[int]]) -> None:
    placement = ExpertPlacement([[0, 1], [2, 3, 3]], CPU, changes=True)
    with pytest.raises(ValueError, match=r"keeps its 4 logical experts and the number on each rank, \[2, 3\]; not"):
        placement.change(held)
    assert placement.held == ((0, 1), (2, 3, 3))
