"""The dispatch by nodes: a token crosses to a node once, however many ranks there hold its experts.

A token travels along its rail (`rails.py`) to each node with its experts, by an all-to-all (`all_to_all.py`), and is
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.parallel.experts.all_to_all import RecvPlan, Rounds, SendPlan
from dsa_engine.parallel.experts.dispatch import Dispatch, Received
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.experts.rails import largest_groups, peers_of
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.side_stream import SideStream


@dataclass(frozen=True)
class NodeGroups:
    """The groups of one rank.

    Attributes:
        node: the ranks of its node.
        rail: the ranks of its rail.
        nodes: the node of every rank.
        there, back: the streams on which tokens and sums change from rail to node and from node to rail.
    """

    node: Group
    rail: Group
    nodes: tuple[int, ...]
    there: SideStream
    back: SideStream


class NodeTables:
    """What a rank looks up for each token, on the device. Ranks keep their number of experts when a placement changes,
    so the tables stay.

    Attributes:
        peers: int32 ``[physical]``, the rank of this rail that takes this rank's tokens for an expert.
        inner: int32 ``[physical]``, the index in this node of an expert's rank, −1 for experts of others.
        takers: int32 ``[ranks]``, the rank of this node that takes the tokens of each rank.
        whole: the placement of all experts on one rank: along a rail, `topk_ids` keep the numbers of physical experts.
        largest_rail, largest_node: number of ranks in the largest of each, the same on every rank.
    """

    def __init__(self, groups: NodeGroups, placement: ExpertPlacement):
        rank_of, nodes, ranks = placement.rank_of, groups.nodes, range(placement.ranks)
        me = groups.rail.ranks[groups.rail.index]
        peers, home = peers_of(me, nodes), nodes[me]
        inner = [groups.node.ranks.index(rank) if rank in groups.node.ranks else -1 for rank in ranks]
        takers = [peers_of(rank, nodes)[home] for rank in ranks]
        tables = torch.tensor([[peers[node] for node in nodes], inner, takers], dtype=torch.int32)
        by_rank = tables.to(rank_of.device)
        self.peers, self.inner = by_rank[:2, rank_of.long()].unbind()
        self.takers = by_rank[2]
        self.whole = ExpertPlacement([range(placement.physical)], rank_of.device)
        self.largest_rail, self.largest_node = largest_groups(nodes)


class Way(NamedTuple):
    """The sizes of one round along the rail, and of what follows it inside the node.

    Attributes:
        along: rows of this rank along the rail.
        inside: rows inside the node, in one round.
        busiest: pairs of the most loaded rank of all.
        brought: pairs in the rows along the rail to the rank that takes the largest number of them.
    """

    along: RecvPlan
    inside: RecvPlan
    busiest: int
    brought: int

    @classmethod
    def of(cls, numbers: Sequence[int], groups: NodeGroups) -> Way:
        """The sizes from one row of :func:`way_numbers`."""
        size = len(groups.nodes)
        there, here, passed, taken, local_pairs = (numbers[i * size : (i + 1) * size] for i in range(5))
        rail, node = groups.rail.ranks, groups.node.ranks
        along = RecvPlan([there[r] for r in rail], [here[r] for r in rail], sum(here))
        inside = RecvPlan([passed[r] for r in node], [taken[r] for r in node], sum(local_pairs))
        return cls(along, inside, *numbers[5 * size :])


class ByNodeDispatch(Dispatch):
    """Tokens on their way along the rail, then inside the node, and back.

    In one round, tokens and sums change from one level to the other on side streams, beside what is launched meanwhile.
    More rounds change on the main stream, when the experts need them and when they are done.

    Args:
        rail: starts the tokens' way to this rank for the experts of its node.
        inside: starts the dispatch inside the node of what a round of the rail has brought.
        rounds: number of rounds inside for each round of the rail; the same on every rank.
    """

    def __init__(
        self,
        groups: NodeGroups,
        rail: Callable[[], Dispatch],
        inside: Callable[[int, Received], Dispatch],
        rounds: Sequence[int],
    ):
        self._inside, self._back = inside, groups.back
        self._rounds = [(outer, inner, count) for outer, count in enumerate(rounds) for inner in range(count)]
        self._dispatch: Dispatch | None = None
        if self.rounds > 1:
            self._rail = rail()
            return

        def pass_on(rail: Dispatch) -> tuple[Dispatch, Dispatch]:
            return rail, inside(0, rail.receive(0))

        self._passed_on = groups.there.relay(rail, pass_on)  # the rail holds what it reads

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    def receive(self, number: int) -> Received:
        outer, inner, _ = self._rounds[number]
        if self.rounds == 1:
            self._rail, self._dispatch = self._passed_on()
            del self._passed_on
        elif inner == 0:
            self._dispatch = self._inside(outer, self._rail.receive(outer))
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


def counts_in_rounds(final: SendPlan, along: SendPlan, cut: Rounds) -> torch.Tensor:
    """What a rank has for every rank in each round along the rail: int32 ``[rounds, size, 4]``:
    rows, and pairs of them, to the rank that holds their experts; the same to the rank of the rail.

    Args:
        final: the ranks of the pairs.
        along: the ranks of the rail that take them.
        cut: the rounds of the rows along the rail.
    """
    rounds, size = cut.counts.shape[:2]
    # A pair travels in the row of the token's first pair with the same rank of the rail.
    first = (along.ranks[:, :, None] == along.ranks[:, None, :]).int().argmax(dim=-1)
    row = cut.pair_rows.gather(1, first)
    row_ends = cut.counts[..., 0].sum(dim=1).cumsum(0)
    number = torch.searchsorted(row_ends, row.clamp(min=0).long(), right=True)
    at = number * size + final.ranks
    each = at.new_zeros(2, rounds * size + 1)  # the last for pairs without an expert
    for counts, counted in zip(each, (final.order.pair_rows >= 0, final.ranks >= 0), strict=True):
        where = at.masked_fill(~counted, rounds * size).flatten()
        counts.scatter_add_(0, where, torch.ones_like(where))
    return torch.cat((each[:, :-1].t().reshape(rounds, size, 2).int(), cut.counts), dim=2)


def way_numbers(by_pair: torch.Tensor, rank: int, takers: torch.Tensor) -> torch.Tensor:
    """The numbers of :class:`Way` for ``rank`` in each round: int32 ``[rounds, 5 · size + 2]``.

    Args:
        by_pair: int32 ``[rounds, from, to, 4]``, the counts of every rank as :func:`counts_in_rounds` has them.
    """
    rows, local_pairs, along, brought = by_pair.unbind(dim=-1)
    # Rows inside the node come from the rank that took them off the rail.
    inside = torch.zeros_like(rows).index_add_(1, takers, rows)
    largest = [counts.sum(dim=1, dtype=torch.int32).amax(dim=1, keepdim=True) for counts in (local_pairs, brought)]
    mine = (along[:, rank], along[:, :, rank], inside[:, rank], inside[:, :, rank], local_pairs[:, :, rank])
    return torch.cat((*mine, *largest), dim=1)
