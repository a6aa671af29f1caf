"""Tokens that cross to a machine once: the same sums, and fewer bytes between machines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dsa_engine.parallel.collective_log import CollectiveLog
from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.experts.by_machine import MachineGroups
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.experts.traffic import peers_of, rails_of
from dsa_engine.parallel.group import Group
from gloo_ranks import gloo_group, on_ranks

HIDDEN, K, EXPERTS = 8, 4, 13


def test_rails_of_uneven_machines() -> None:
    assert rails_of([0, 0, 1, 1]) == [[0, 2], [1, 3]]
    assert rails_of([0, 0, 0, 1, 1]) == [[0, 2, 3], [1, 4]]
    assert peers_of(2, [0, 0, 0, 1, 1]) == {0: 2, 1: 3}
    assert peers_of(3, [0, 0, 0, 1, 1]) == {0: 0, 1: 3}


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rank)
    count = (12, 0, 9, 5)[rank % 4]
    experts = torch.rand(count, EXPERTS, generator=g).argsort(dim=1)[:, :K].int()
    return torch.randn(count, HIDDEN, generator=g), experts, torch.rand(count, K, generator=g)


@pytest.mark.parametrize("machines", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("max_pairs", [1000, 20])
def test_equal_to_all_to_all(machines: tuple[int, ...], max_pairs: int) -> None:
    size = len(machines)

    def work(world: Group) -> tuple[list[torch.Tensor], list[int]]:
        me = world.index
        inside = [rank for rank in range(size) if machines[rank] == machines[me]]
        (rail,) = [rail for rail in rails_of(machines) if me in rail]
        groups = MachineGroups(
            gloo_group(dist.PrefixStore("machine", store), inside, me),
            gloo_group(dist.PrefixStore("rail", store), rail, me),
            machines,
        )
        placement = ExpertPlacement.contiguous(EXPERTS, size, torch.device("cpu"))
        parallel, results, slow = ExpertParallel(world, placement, groups), [], []
        methods: tuple[DispatchMethod, ...] = ("all_to_all", "by_machine")
        for method in methods:
            world.log = log = groups.machine.log = groups.rail.log = CollectiveLog()
            dispatch = parallel.dispatch(*inputs(world.index), method, 12, max_pairs)
            for number in range(dispatch.rounds):
                here = dispatch.receive(number)
                scale = (here.weights * (here.experts + 1)).where(here.experts >= 0, 0.0).sum(dim=1)
                dispatch.send_back(number, here.tokens * scale[:, None])
            results.append(dispatch.combine())
            home = machines[world.index]
            slow.append(
                sum(
                    n
                    for one in log.collectives
                    if one.asynchronous
                    for rank, n in zip(one.ranks, one.sent, strict=True)
                    if machines[rank] != home
                )
            )
        return results, slow

    store = dist.HashStore()
    ranks = on_ranks(size, work)
    for (theirs, ours), _ in ranks:
        torch.testing.assert_close(ours, theirs)
    row, back = (HIDDEN + 2 * K) * 4, HIDDEN * 4
    rank_of = ExpertPlacement.contiguous(EXPERTS, size, torch.device("cpu")).rank_of
    expected = [0, 0]
    for rank in range(size):
        for chosen in inputs(rank)[1].tolist():
            reached = {int(rank_of[e]) for e in chosen}
            expected[0] += sum(machines[r] != machines[rank] for r in reached)
            expected[1] += len({machines[r] for r in reached} - {machines[rank]})
    assert [sum(slow[i] for _, slow in ranks) for i in range(2)] == [n * (row + back) for n in expected]
    assert expected[1] < expected[0]
