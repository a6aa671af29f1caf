"""A dispatch by machine of an emulated rank and of the same rank among true ones, which are threads, with the same
assigned experts: what arrives in every round, every collective's bytes, and those of the formula."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.expert_parallel import AssignedExpertParallel
from dsa_engine.measure.emulation.mesh import EmulatedMesh
from dsa_engine.parallel.collective_log import CollectiveLog
from dsa_engine.parallel.experts import MoeDispatch
from dsa_engine.parallel.experts.by_machine import MachineGroups
from dsa_engine.parallel.experts.choose_dispatch import DispatchChoice
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.experts.traffic import RowBytes, Tokens, collectives, rails_of
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.side_stream import SideStream
from gloo_ranks import gloo_group, on_ranks

HIDDEN, K, EXPERTS, GROUPS, TOP_GROUPS = 8, 4, 24, 4, 2
CPU = torch.device("cpu")
TOKENS = (12, 0, 9, 5, 7, 4)
SKEWED = (*[6.0] * 4, *[0.2] * 20)  # nearly all tokens choose the first experts


def assigned(rank: int, machines: Sequence[int], loads: tuple[float, ...] | None) -> AssignedExperts:
    one = AssignedExperts(ExpertPlacement.contiguous(EXPERTS, len(machines), CPU), rank, loads)
    one.limit(GROUPS, TOP_GROUPS)
    one.begin_step(TOKENS[: len(machines)])
    return one


def dispatched(parallel: ExpertParallel, log: CollectiveLog, method: MoeDispatch, max_pairs: int) -> Any:
    """Rows, choices and sizes of every round, and the collectives."""
    count = TOKENS[parallel.group.index]
    rows, given = torch.randn(count, HIDDEN), torch.zeros(count, K, dtype=torch.int32)  # a router's choices
    log.collectives.clear()
    dispatch = parallel.dispatch(rows, given, torch.rand(count, K), method, max(TOKENS), max_pairs)
    rounds = []
    for number in range(dispatch.rounds):
        here = dispatch.receive(number)
        rounds.append((len(here.tokens), here.local(len(parallel.held)).tolist(), here.served))
        dispatch.send_back(number, here.tokens.clone())
    assert dispatch.combine().shape == (count, HIDDEN)
    return rounds, [(c.kind, c.ranks, c.index, c.sent, c.received) for c in log.collectives]


Run = Callable[[ExpertParallel, CollectiveLog], Any]


def on_true_ranks(machines: tuple[int, ...], loads: tuple[float, ...] | None, work: Run) -> list[Any]:
    machine_store, rail_store, size = dist.HashStore(), dist.HashStore(), len(machines)

    def one(world: Group) -> Any:
        me = world.index
        inside = [rank for rank in range(size) if machines[rank] == machines[me]]
        (rail,) = [rail for rail in rails_of(machines) if me in rail]
        beside = SideStream(CPU), SideStream(CPU)
        groups = MachineGroups(
            gloo_group(machine_store, inside, me), gloo_group(rail_store, rail, me), machines, *beside
        )
        world.log = groups.machine.log = groups.rail.log = log = CollectiveLog()
        of_rank, choice = assigned(me, machines, loads), DispatchChoice(machines)
        parallel = AssignedExpertParallel(world, of_rank.choices(TOKENS[me], K, CPU).placement, of_rank, groups, choice)
        return work(parallel, log)

    return on_ranks(size, one)


def on_emulated_ranks(machines: tuple[int, ...], loads: tuple[float, ...] | None, work: Run) -> list[Any]:
    results = []
    for rank in range(len(machines)):
        config = EmulatedConfig(emulate_world=len(machines), emulate_rank=rank, moe_dispatch="auto", expert_loads=loads)
        mesh = EmulatedMesh(config, CPU)
        mesh.set_machines(machines)
        parallel = mesh.experts.of_layer(EXPERTS, 0, GROUPS, top_groups=TOP_GROUPS)
        mesh.assigned[0].limit(GROUPS, TOP_GROUPS)
        mesh.assigned[0].begin_step(TOKENS[: len(machines)])
        log = CollectiveLog()
        for group in mesh.groups:
            group.log = log
        results.append(work(parallel, log))
    return results


@pytest.mark.parametrize(
    ("machines", "loads"),
    [((0, 0, 1, 1), None), ((0, 0, 0, 1), SKEWED), ((0, 0, 1, 1, 2, 2), SKEWED)],
    ids=["even", "uneven", "three"],
)
def test_an_emulated_rank_receives_what_a_true_one_does(
    machines: tuple[int, ...], loads: tuple[float, ...] | None
) -> None:
    def work(parallel: ExpertParallel, log: CollectiveLog) -> Any:
        parallel.groups, parallel.top_groups = GROUPS, TOP_GROUPS
        runs = [("by_machine", 1000), ("by_machine", 30), ("by_machine", 1), ("all_to_all", 1000), ("auto", 1000)]
        return [dispatched(parallel, log, method, bound) for method, bound in runs]

    true, emulated = (run(machines, loads, work) for run in (on_true_ranks, on_emulated_ranks))
    assert emulated == true
    assert len(true[0][1][0]) > 1 and len(true[0][2][0]) > 2, "several rounds"
    step = assigned(0, machines, loads).choices(TOKENS[0], K, CPU)
    reached = step.placement.rank_of[step.physical.long()].split(step.tokens)
    by_rank = [[sum(to in row for row in of.tolist()) for to in range(len(machines))] for of in reached]
    at = [torch.tensor(machines)[of.long()].tolist() for of in reached]
    by_machine = [[sum(number in row for row in of) for number in sorted(set(machines))] for of in at]
    tokens, row = Tokens(step.tokens, by_rank, by_machine), RowBytes.of(4 * HIDDEN, K)
    for rank, runs in enumerate(emulated):
        for method, (_, seen) in (("by_machine", runs[0]), ("all_to_all", runs[3])):
            predicted = collectives(method, tokens, machines, row, rank)  # type: ignore[arg-type]
            plain = [(c.kind, c.ranks, c.index, c.sent, c.received) for c in predicted if len(c.ranks) > 1]
            assert seen == plain


def test_auto_is_chosen_as_on_true_ranks_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mesh = EmulatedConfig(emulate_world=64, emulate_rank=9, moe_dispatch="auto").create_mesh("cpu")
    parallel = mesh.experts.of_layer(256, 0, 8, top_groups=4)
    mesh.assigned[0].limit(8, 4)
    groups = mesh.machine_groups
    assert groups is not None
    groups.rail.log = log = CollectiveLog()
    given = torch.randn(64, 2048), torch.zeros(64, 8, dtype=torch.int32), torch.rand(64, 8)
    assert parallel.dispatch(*given, "auto", 64).rounds == 1
    assert "dispatch of at most 64 tokens a rank: by_machine (modelled: all_gather" in caplog.text
    (along,) = log.collectives
    assert along.ranks == tuple(range(1, 64, 8)) and all(along.sent[:1] + along.sent[2:])
    assert along.bytes_sent <= 64 * 4 * RowBytes.of(8192, 8).there, "a token takes experts of four machines at most"


@pytest.mark.parametrize("rows", [1, 40])
def test_the_all_gather_of_few_rows_has_two_levels(rows: int) -> None:
    """The collectives of the emulated rank are those of the formula, which is what "auto" compares."""
    mesh = EmulatedConfig(emulate_world=64, emulate_rank=9).create_mesh("cpu")
    parallel = mesh.experts.of_layer(256, 0, 8, top_groups=4)
    log, row = CollectiveLog(), RowBytes.of(4 * 2048, 8)
    for group in mesh.groups:
        group.log = log
    given = torch.randn(rows, 2048), torch.zeros(rows, 8, dtype=torch.int32), torch.rand(rows, 8)
    dispatch = parallel.dispatch(*given, "all_gather", rows)
    dispatch.send_back(0, torch.randn_like(dispatch.receive(0).tokens))
    assert dispatch.combine().shape == (rows, 2048)
    predicted = collectives("all_gather", Tokens([rows] * 64, [], []), mesh.machines, row, 9)
    assert [(c.kind, c.ranks, c.index, c.sent) for c in log.collectives] == [
        (c.kind, c.ranks, c.index, c.sent) for c in predicted
    ]
    assert len(predicted) == (4 if rows == 1 else 2)
