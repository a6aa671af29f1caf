"""All-gathers along rails: the same rows, and fewer bytes between nodes. That a prefill on
several nodes gives the same tokens is in ``tests/distributed/model/test_equal_to_single_process.py``."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel import mesh as mesh_module
from dsa_engine.parallel.experts.rails import are_equal_neighbours
from dsa_engine.parallel.gather_by_node import TwoLevels, gather_group
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.side_stream import SideStream
from gloo_ranks import gloo_group

ROWS, COLUMNS = 3, 5
NODES = (0, 0, 1, 1)


def crossing(group: Group, nodes: Sequence[int]) -> int:
    """Bytes that this rank's all-gathers send to another node, counted with the ring's steps: in each of them a rank
    sends one part to the next rank."""
    assert group.log is not None
    sent = 0
    for one in group.log:
        after = one.ranks[(one.ranks.index(one.rank) + 1) % len(one.ranks)]
        if nodes[one.rank] != nodes[after]:
            sent += (len(one.ranks) - 1) * max(one.sent)
    return sent


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_same_rows_and_fewer_bytes_between_nodes(asynchronous: bool) -> None:
    whole, stores = dist.HashStore(), [dist.HashStore(), dist.HashStore()]
    rows = torch.randn(len(NODES), ROWS, COLUMNS)

    def run(rank: int) -> tuple[list[torch.Tensor], int, int, int]:
        plain, given = gloo_group(whole, range(len(NODES)), rank), iter(stores)

        def make(parts: Sequence[Sequence[int]]) -> Group:
            store = next(given)
            (mine,) = [part for part in parts if rank in part]
            return gloo_group(store, mine, rank)

        group = gather_group(plain, [range(len(NODES))], NODES, torch.device("cpu"), make)
        levels = group.two_level
        assert levels is not None and (levels.rail.size, levels.node.size) == (2, 2)
        gathers = [one.all_gather_async if asynchronous else one.all_gather for one in (plain, group)]
        begun = [gather(rows[rank]) for gather in gathers]
        gathered = [one() if asynchronous else one for one in begun]
        by_rails = crossing(levels.rail, NODES) + crossing(levels.node, NODES)
        return gathered, crossing(plain, NODES), by_rails, sum(part.bytes_sent for part in group.parts)

    with ThreadPoolExecutor(len(NODES)) as ranks:
        results = list(ranks.map(run, range(len(NODES))))
    part = rows[0].nbytes
    for (plain, by_node), _, _, sent in results:
        assert torch.equal(plain, rows.flatten(0, 1)) and torch.equal(by_node, plain)
        assert sent == (1 + 2) * part, "one part along the rail, and two inside"
    ring, rails = (sum(one[i] for one in results) for i in (1, 2))
    assert (ring, rails) == (6 * part, 4 * part)


@pytest.mark.parametrize(
    ("nodes", "rails"),
    [
        ((0, 0), False),
        ((0, 1), False),
        ((0, 0, 1, 1), True),
        (tuple(rank // 8 for rank in range(16)), True),
        ((0, 0, 1), False),  # uneven
        ((0, 1, 0, 1), False),  # a node's ranks are not neighbours
    ],
)
def test_where_there_are_rails(nodes: tuple[int, ...], rails: bool) -> None:
    assert are_equal_neighbours(nodes) == rails


def test_each_context_parallel_group_has_rails_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(mesh_module.dist, "new_group", lambda ranks, **_: made.append(tuple(ranks)) or ranks)
    mesh = Mesh(ParallelConfig(cp_size=4), 6, 8, torch.device("cpu"))
    made.clear()
    mesh.set_nodes([0, 0, 0, 0, 1, 1, 2, 2])
    levels = mesh.cp.two_level
    assert levels is not None and mesh.cp.ranks == (4, 5, 6, 7) and mesh.cp.index == 2
    assert (levels.rail.ranks, levels.node.ranks) == ((4, 6), (6, 7))
    assert made == [(4, 5), (6, 7), (4, 6), (5, 7)], "the first group is inside a node"
    assert levels.rail in mesh.groups and levels.node in mesh.groups and mesh.ep.two_level is None


def test_sums_and_gathers_of_small_parts() -> None:
    """Both ways of a dispatch that gathers, along rails for parts up to the limit, beside the backend's own."""
    whole, parts, inside = dist.HashStore(), (dist.HashStore(), dist.HashStore()), ((0, 1), (2, 3))
    given = torch.randint(-9, 9, (len(NODES), len(NODES) * ROWS, COLUMNS)).float()  # exact sums, in any order

    def run(rank: int) -> list[torch.Tensor]:
        group = gloo_group(whole, range(len(NODES)), rank)
        rail, node = (
            gloo_group(store, next(ranks for ranks in of if rank in ranks), rank)
            for store, of in zip(parts, (((0, 2), (1, 3)), inside), strict=True)
        )
        results = []
        for limit in (given[0].nbytes, 0):
            group.two_level = TwoLevels(rail, node, SideStream(torch.device("cpu")), limit)
            begun = group.all_gather_async(given[rank]), group.reduce_scatter_async(given[rank])
            results += [group.reduce_scatter(given[rank]), *(wait() for wait in begun)]
        assert group.log is not None and [one.kind for one in group.log] == [
            "all_gather",
            "reduce_scatter",
            "reduce_scatter",
        ], "without the limit"
        assert rail.log is not None and [max(one.sent) for one in rail.log] == [
            given[0].nbytes,
            given[0].nbytes // 4,
            given[0].nbytes // 4,
        ]
        return results

    with ThreadPoolExecutor(len(NODES)) as ranks:
        for rank, results in enumerate(ranks.map(run, range(len(NODES)))):
            summed = given.sum(dim=0).chunk(len(NODES))[rank]
            for number, wanted in enumerate((summed, given.flatten(0, 1), summed) * 2):
                assert torch.equal(results[number], wanted)


@pytest.mark.parametrize("sums_too", [True, False])
def test_rows_by_rail(sums_too: bool) -> None:
    """Gathered by rail, a node's first ranks come before its second ones, and their sums are those of rows in rank
    order; also where a part of the sums is larger than those that go along rails."""
    stores, parts = [dist.HashStore() for _ in range(3)], ((range(4),), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    given = torch.randint(-9, 9, (len(NODES), ROWS, COLUMNS)).float()
    sums = torch.randint(-9, 9, (len(NODES), len(NODES), 2 * ROWS, COLUMNS)).float()  # [from, to]
    rails = [0, 2, 1, 3]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        group, rail, node = (
            gloo_group(store, next(ranks for ranks in one if rank in ranks), rank)
            for store, one in zip(stores, parts, strict=True)
        )
        group.two_level = TwoLevels(rail, node, SideStream(torch.device("cpu")), (1 + sums_too) * given[0].nbytes)
        assert group.goes_by_rail(given[0].nbytes) and group.goes_by_rail(2 * given[0].nbytes) == sums_too
        gathered = group.all_gather_async(given[rank], by_rail=True)()
        summed = group.reduce_scatter_async(sums[rank, rails].flatten(0, 1), by_rail=True)()
        assert group.log is not None
        return gathered, summed, [one.kind for one in group.log]

    with ThreadPoolExecutor(len(NODES)) as ranks:
        for rank, (gathered, summed, in_one) in enumerate(ranks.map(run, range(len(NODES)))):
            assert torch.equal(gathered, given[rails].flatten(0, 1))
            assert torch.equal(summed, sums.sum(dim=0)[rank])
            assert in_one == ([] if sums_too else ["reduce_scatter"]), "what does not go along rails"
