"""The dispatch by nodes: a token crosses to a node once, however many ranks there hold its experts.

A token travels along its rail (`placement.py`) to each node with its experts by an all-to-all (`all_to_all.py`), and is
passed on inside by another one. The sums of a node's ranks are added in float32, in the order of the token's
pairs, and cross back as one row in the tokens' dtype; those of the nodes are added in float32 at home.

In float32 the sums differ from those of the all-to-all by their order only. In bfloat16 a node's sum is rounded once
more before it crosses, as float32 rows would double what the slow links carry back. With ``quantized_sums`` it is
rounded to codes and scales instead, once, and only there: inside a node sums travel in the tokens' dtype.

Both all-to-alls have rounds, so that skew costs time and not memory: a round along the rail brings a rank as many
pairs as it may compute in a round itself (`all_to_all.py: rounds_needed`), and is passed on in rounds of its own. The
number of rounds does not change a bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dsa_engine.kernels.moe.token_ranks import TokenRanks, token_ranks
from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.parallel.experts.all_to_all import (
    AllToAll,
    AllToAllDispatch,
    Rounds,
    in_rounds,
    rounds_needed,
    send_in_rounds,
)
from dsa_engine.parallel.experts.dispatch import (
    CountedDispatcher,
    Dispatch,
    Dispatcher,
    Memory,
    PrefillSizes,
    Ranks,
    Received,
    Routed,
    StepSizes,
)
from dsa_engine.parallel.experts.placement import (
    ExpertParallel,
    ExpertPlacement,
    NodeGroups,
    RecvPlan,
    Way,
    has_two_levels,
    largest_groups,
    peers_of,
)
from dsa_engine.parallel.group import Group

logger = logging.getLogger(__name__)


class NodeTables:
    """What a rank looks up on the device. Ranks keep their number of experts when a placement changes, so it stays.

    Attributes:
        there: int32 ``[2, physical]``, an expert's rank, and that of this rail that takes this rank's tokens for it.
        inner: int32 ``[physical]``, the index in this node of an expert's rank, −1 for experts of others.
        takers: ``[ranks]``, on the host, the rank of this node that takes the tokens of each rank.
        whole: all experts on one rank: along a rail, `topk_ids` keep the numbers of physical experts.
        largest_rail, largest_node: number of ranks in the largest of each, the same on every rank.
    """

    def __init__(self, groups: NodeGroups, placement: ExpertPlacement):
        rank_of, nodes, ranks = placement.rank_of, groups.nodes, range(len(placement.held))
        me = groups.rail.ranks[groups.rail.index]
        peers, home = peers_of(me, nodes), nodes[me]
        inner = [groups.node.ranks.index(rank) if rank in groups.node.ranks else -1 for rank in ranks]
        self.takers = torch.tensor([peers_of(rank, nodes)[home] for rank in ranks])
        tables = torch.tensor([[peers[node] for node in nodes], inner], dtype=torch.int32)
        by_rank = tables.to(rank_of.device)
        along, self.inner = by_rank[:, rank_of.long()].unbind()
        self.there = torch.stack((rank_of, along))
        whole = ExpertPlacement([range(placement.physical)], rank_of.device)
        self.whole = ExpertParallel(Group((me,), 0, None), whole)
        self.largest_rail, self.largest_node = largest_groups(nodes)


class ByNode(CountedDispatcher):
    def __init__(self, groups: NodeGroups):
        self._groups = groups

    def count(self, experts: ExpertParallel, routed: Routed, step: StepSizes) -> Callable[[], Dispatch]:
        groups, size = self._groups, experts.group.size
        if (tables := experts.node_tables) is None:
            tables = experts.node_tables = NodeTables(groups, experts.placement)
        # Of the ranks that hold experts, and of those along the rail that take tokens for them.
        along = token_ranks(routed.topk_ids, tables.there, size)
        assert along.counts is not None
        wait = experts.ways(along.counts[None], groups, tables.takers)
        counted: Callable[[], Dispatch] = this_thread.as_one(
            partial, ByNode._counted, self, experts, routed, step, along, wait
        )
        return counted

    def _counted(
        self, experts: ExpertParallel, routed: Routed, step: StepSizes, along: TokenRanks, wait: Callable[[], list[Way]]
    ) -> Dispatch:
        groups, tables, ways = self._groups, experts.node_tables, wait()
        k, max_pairs = routed.topk_ids.shape[1], step.max_pairs
        rows, rounds = sum(ways[0].along.send), rounds_needed(ways[0].brought, max_pairs, tables.largest_rail, k)
        source, pair_rows = along.tokens[:rows], along.pair_rows
        if rounds > 1:
            final = token_ranks(routed.topk_ids, tables.there[0], experts.group.size, counted=False)
            assert along.counts is not None
            along = along._replace(counts=along.counts[:, 2:])
            cut = in_rounds(along, rows, rounds)
            source, pair_rows, _ = cut
            ways = experts.ways(counts_in_rounds(final, along, cut), groups, tables.takers)()
        plans, quantized = [way.along for way in ways], experts.quantized_sum_bytes is not None
        rail = partial(AllToAllDispatch, groups.rail, tables.whole, routed, source, pair_rows, plans, quantized)
        inside = [(way.inside, rounds_needed(way.busiest, max_pairs, tables.largest_node, k)) for way in ways]
        return ByNodeDispatch(groups, experts, tables.inner, rail, inside)

    def memory(self, sizes: PrefillSizes) -> Memory:
        """There are the results of a round inside, and the rows along the rail: even routing sends a token to few
        nodes."""
        of_all, k, nodes = AllToAll().memory(sizes), sizes.k, self._groups.nodes
        rail, node = largest_groups(nodes)
        bound = max(sizes.chunk or sizes.pairs, max(rail, node) * (k + 1))  # pairs that a round brings
        # Rows of both micro-batches of a step may be on their way at once.
        sent, brought = sizes.tokens * min(len(set(nodes)), k), min(2 * bound, rail * sizes.tokens)
        held = (sent + brought) * sizes.there + (sent + bound) * sizes.back
        return of_all._replace(held=max(of_all.held, held))


def make(mesh: Ranks) -> Dispatcher:
    """By node, or an all-to-all where nodes have one level."""
    if mesh.node_groups is not None:
        return ByNode(mesh.node_groups)
    if mesh.is_leader and not has_two_levels(mesh.nodes):
        which = "all ranks are on one node" if len(set(mesh.nodes)) == 1 else "every node has one rank"
        logger.info("the dispatch 'by_node' is 'all_to_all' here, as %s", which)
    return AllToAll()


class ByNodeDispatch(Dispatch):
    """In one round, tokens and sums change from one level to the other on side streams, beside what is launched
    meanwhile. More rounds change on the main stream, when the experts need them and when they are done.

    Args:
        rail: starts the tokens' way to this rank for the experts of its node.
        inside: for each round of the rail, the sizes inside the node of what it brings, and the number of rounds there,
            the same on every rank.
    """

    rounds = 1

    def __init__(
        self,
        groups: NodeGroups,
        experts: ExpertParallel,
        inner: torch.Tensor,
        rail: Callable[[], Dispatch],
        inside: Sequence[tuple[RecvPlan, int]],
    ):
        self._node, self._back, self._experts = groups.node, groups.back, experts
        self._rank_of, self._inside = inner, inside
        self._rounds = [(outer, inner, count) for outer, (_, count) in enumerate(inside) for inner in range(count)]
        self.rounds = len(self._rounds)
        self._dispatch: Dispatch | None = None
        if self.rounds > 1:
            self._rail = rail()
            return

        def pass_on(rail: Dispatch) -> tuple[Dispatch, Dispatch]:
            return rail, self._pass_on(0, rail)

        self._passed_on = groups.there.relay(rail, pass_on)  # the rail holds what it reads

    def _pass_on(self, number: int, rail: Dispatch) -> Dispatch:
        """Waits for what a round of the rail brings, and starts its dispatch inside the node."""
        brought, (whole, rounds) = Routed(*rail.receive(number)[:3]), self._inside[number]
        plan = token_ranks(brought.topk_ids, self._rank_of, self._node.size, counted=rounds > 1)
        return send_in_rounds(self._node, self._experts, brought, plan, whole, rounds)

    def receive(self, number: int) -> Received:
        outer, inner, _ = self._rounds[number]
        if self.rounds == 1:
            self._rail, self._dispatch = self._passed_on()
            del self._passed_on
        elif inner == 0:
            self._dispatch = self._pass_on(outer, self._rail)
        assert self._dispatch is not None
        return self._dispatch.receive(inner)

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        outer, inner, count = self._rounds[number]
        dispatch, rail = self._dispatch, self._rail
        assert dispatch is not None
        if self.rounds == 1:

            def send() -> Dispatch:
                dispatch.send_back(0, sums)
                rail.send_back(0, dispatch.combine())
                return dispatch  # held until the main stream has waited: its memory belongs to the other side stream

            self._returned = self._back.run(send, sums)
            self._dispatch = None
            return
        dispatch.send_back(inner, sums)
        if inner == count - 1:
            self._dispatch = None  # with the rows that came along the rail
            rail.send_back(outer, dispatch.combine())

    def combine(self) -> torch.Tensor:
        if self.rounds == 1:
            self._returned()
            del self._returned
        return self._rail.combine()


def counts_in_rounds(final: TokenRanks, along: TokenRanks, cut: Rounds) -> torch.Tensor:
    """What a rank has for every rank in each round along the rail, int32 ``[rounds, size, 4]``: rows, and their pairs,
    to the rank that holds the experts (``final``); the same to the rank of the rail that takes them (``along``)."""
    rounds, size = cut.counts.shape[:2]
    # A pair travels in the row of the token's first pair with the same rank of the rail.
    first = (along.ranks[:, :, None] == along.ranks[:, None, :]).int().argmax(dim=-1)
    row = cut.pair_rows.gather(1, first)
    row_ends = cut.counts[..., 0].sum(dim=1).cumsum(0)
    number = torch.searchsorted(row_ends, row.clamp(min=0).long(), right=True)
    at = number * size + final.ranks
    each = at.new_zeros(2, rounds * size + 1)  # the last for pairs without an expert
    for counts, counted in zip(each, (final.pair_rows >= 0, final.ranks >= 0), strict=True):
        where = at.masked_fill(~counted, rounds * size).flatten()
        counts.scatter_add_(0, where, torch.ones_like(where))
    return torch.cat((each[:, :-1].t().reshape(rounds, size, 2).int(), cut.counts), dim=2)
