"""The placement of experts on ranks, and one rank's view of it: its experts, what ranks tell each other of tokens that
are to come, and the groups on which tokens travel by node.

The model's router chooses *logical* experts. Ranks hold *physical* experts, numbered rank after rank. A logical expert
has one physical expert or several, its replicas, which have the same weights. A dispatch sees only physical experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas
from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.kernels.runtime.transfer import SideStream, download, to_host, upload
from dsa_engine.parallel.group import Group

Held = tuple[tuple[int, ...], ...]  # for every rank, its logical experts in the order of its weights


class ExpertPlacement:
    """The ranks of each expert of a layer; the same on every rank. They may hold different numbers of experts.
    ``changes``: whether :meth:`change` may be called, so that CUDA graphs must look every expert up.

    Attributes:
        experts, physical: numbers of logical and of physical experts.
        first: the first physical expert of each rank.
        rank_of: int32 ``[physical]``, the rank of each physical expert.
    """

    def __init__(self, held: Sequence[Sequence[int]], device: torch.device, changes: bool = False):
        self.held = _checked(held)
        self.experts = 1 + max(max(experts) for experts in self.held)
        *self.first, self.physical = 0, *accumulate(map(len, self.held))
        ranks = [rank for rank, experts in enumerate(self.held) for _ in experts]
        self.rank_of = torch.tensor(ranks, dtype=torch.int32, device=device)
        # Each rank's first physical expert and their number; made here, as a CUDA graph may read them.
        self._spans = torch.tensor([*zip(self.first, map(len, self.held))], device=device)
        self._replicas: torch.Tensor | None = None  # [experts, 1 + n]: see choose_replicas
        if changes or [*chain(*self.held)] != list(range(self.physical)):
            self._replicas = self._table().to(device)

    def change(self, held: Sequence[Sequence[int]]) -> None:
        """Replaces ``held``, for the work that is given to the device from now on; CUDA graphs stay valid. The host
        does not wait."""
        assert self._replicas is not None, "made with changes=True"
        changed = _checked(held)
        if [*map(len, changed)] != [*map(len, self.held)] or {*chain(*changed)} != set(range(self.experts)):
            raise ValueError(
                f"a placement keeps its {self.experts} logical experts and the number on each rank, "
                f"{[*map(len, self.held)]!r:.200}; not {held!r:.200}"
            )
        self.held = changed
        upload(self._table(), self._replicas.device, out=self._replicas)

    def replicas(self) -> list[list[int]]:
        """The physical experts of each logical one, ascending."""
        of_logical: list[list[int]] = [[] for _ in range(self.experts)]
        for number, expert in enumerate(chain(*self.held)):
            of_logical[expert].append(number)
        return of_logical

    def to_physical(self, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The physical experts of logical ones ``topk_ids [T, k]``, int32; −1 stays −1. Rows are numbered from
        ``first``; the number decides which replica computes a row, so that each computes equally many."""
        replicas = self.choosing(first)
        return topk_ids if replicas is None else choose_replicas(topk_ids, *replicas)

    def choosing(self, first: int) -> Replicas | None:
        """What :meth:`to_physical` chooses with; None: physical experts are numbered as logical ones."""
        return None if self._replicas is None else Replicas(self._replicas, first)

    def spread(self, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Physical experts instead of ``topk_ids [T, k]``, each on the rank after that of the one before; −1 stays. The
        pairs of all ranks are numbered, this rank's from ``first`` on: so every rank is chosen equally often."""
        numbers = torch.arange(first, first + topk_ids.numel(), device=topk_ids.device).view(topk_ids.shape)
        rank, turn = numbers % len(self.held), numbers // len(self.held)
        spans = self._spans[rank]
        return (spans[..., 0] + turn % spans[..., 1]).to(topk_ids.dtype).where(topk_ids >= 0, topk_ids)

    def _table(self) -> torch.Tensor:
        """It is as wide as for the placement with the most replicas of one expert."""
        table = torch.full((self.experts, 2 + self.physical - self.experts), -1, dtype=torch.int32)
        for expert, physical in enumerate(self.replicas()):
            table[expert, : 1 + len(physical)] = torch.tensor([len(physical), *physical], dtype=torch.int32)
        return table


def contiguous(experts: int, ranks: int) -> Held:
    """Consecutive experts on each rank, divided evenly; the first ranks hold one more if there is a remainder."""
    if ranks > experts:
        raise ValueError(
            f"n_routed_experts {experts} cannot be divided over {ranks} ranks: each holds at least one; "
            f"start at most {experts}"
        )
    counts = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    return tuple(tuple(range(last - count, last)) for count, last in zip(counts, accumulate(counts), strict=True))


def _checked(held: Sequence[Sequence[int]]) -> Held:
    experts = {expert for of_rank in held for expert in of_rank}
    if experts != set(range(len(experts))) or not all(held) or not held:
        raise ValueError(f"every expert lies on a rank, and every rank holds one; not {held!r:.200}")
    return tuple(tuple(of_rank) for of_rank in held)


@dataclass(frozen=True)
class NodeGroups:
    """The groups of one rank for tokens that travel by node: along its rail to each node with experts of them, and from
    there to their ranks."""

    node: Group
    rail: Group  # at least one rank of every node (more, where nodes differ in size)
    nodes: tuple[int, ...]  # of every rank
    there: SideStream  # on this and the next, tokens and sums change from rail to node and from node to rail
    back: SideStream


@lru_cache(maxsize=64)
def rails_of(nodes: tuple[int, ...]) -> list[list[int]]:
    """The ranks of each rail, where every rank has one of ``nodes``: there are as many rails as the smallest node has
    ranks, and each node has a rank in every rail."""
    rails: list[list[int]] = [[] for _ in range(min(Counter(nodes).values()))]
    taken: Counter[int] = Counter()
    for rank, node in enumerate(nodes):
        rails[taken[node] % len(rails)].append(rank)
        taken[node] += 1
    return rails


def largest_groups(nodes: tuple[int, ...]) -> tuple[int, int]:
    """Number of ranks of the largest rail, and of the largest node."""
    return max(map(len, rails_of(nodes))), max(Counter(nodes).values())


def peers_of(rank: int, nodes: tuple[int, ...]) -> dict[int, int]:
    """By node, the rank that takes the tokens of ``rank`` there: one of its rail; ``rank`` itself at home."""
    (rail,) = [rail for rail in rails_of(nodes) if rank in rail]
    by_node = {node: [one for one in rail if nodes[one] == node] for node in set(nodes)}
    home = by_node[nodes[rank]].index(rank)
    return {node: there[home % len(there)] for node, there in by_node.items()}


def has_two_levels(nodes: Sequence[int]) -> bool:
    """Whether there are several nodes, one of them with several ranks. Else a dispatch by node is an all-to-all."""
    return 1 < len(set(nodes)) < len(nodes)


class RecvPlan(NamedTuple):
    """The sizes of a round that the host must know."""

    send: list[int]  # tokens of this rank to each rank
    receive: list[int]  # tokens from each rank
    local_pairs: int  # token-expert pairs of the received tokens whose experts are this rank's

    @classmethod
    def of(cls, sent: list[list[int]], received: list[list[int]]) -> RecvPlan:
        """The plan for rows and pairs ``[size, 2]`` to each rank, and from each rank."""
        return cls([row[0] for row in sent], [row[0] for row in received], sum(row[1] for row in received))


class Way(NamedTuple):
    """The sizes of a round along the rail, and inside the node after it, that the host must know.

    ``busiest`` and ``brought`` are numbers of token-expert pairs: those whose experts the most loaded rank holds, and
    those that the rail brings to the rank that takes the largest number of them.
    """

    along: RecvPlan
    inside: RecvPlan
    busiest: int
    brought: int

    @classmethod
    def of(cls, counts: torch.Tensor, rank: int, takers: torch.Tensor, groups: NodeGroups) -> Way:
        """For ``rank``, of ``counts [from, to, 4]``: :func:`.by_node.counts_in_rounds` of every rank in a round.
        ``takers``: the rank of this node that takes the tokens of each."""
        rows, pairs, along, _ = counts.unbind(dim=-1)
        # Rows inside the node come from the rank that took them off the rail.
        inside = torch.zeros_like(rows).index_add_(0, takers, rows)
        rail, node = groups.rail.ranks, groups.node.ranks
        there, here, passed, taken = (
            [row[r] for r in some]
            for some, numbers in ((rail, along), (node, inside))
            for row in (numbers[rank].tolist(), numbers[:, rank].tolist())
        )
        _, busiest, _, brought = counts.sum(dim=0).amax(dim=0).tolist()
        plan = RecvPlan(passed, taken, sum(pairs[:, rank].tolist()))
        return cls(RecvPlan(there, here, sum(here)), plan, busiest, brought)


class ExpertParallel:
    """The experts of a layer, divided over a group; one rank's view.

    Attributes:
        groups, top_groups: those of the model's router.
        even: spread pairs evenly over the ranks instead of routing them
            (:meth:`.layer_placements.ExpertDivision.even_routing`).
        quantized_sum_bytes: bytes of a sum that travels back as codes and scales, in an all-to-all or along a rail;
            None: sums travel in the tokens' dtype.
        side_stream: the stream of tokens that are sent beside other work.
        node_tables: what :mod:`.by_node` looks up.
    """

    def __init__(self, group: Group, placement: ExpertPlacement):
        self.group = group
        self.placement = placement
        self.groups, self.top_groups = 1, 1
        self.even = False
        self.quantized_sum_bytes: int | None = None
        self.side_stream = SideStream(torch.device("cpu"))
        self.node_tables: Any = None

    @property
    def held(self) -> tuple[int, ...]:
        return self.placement.held[self.group.index]

    @property
    def fraction(self) -> float:
        """The fraction of all physical experts that this rank holds."""
        return len(self.held) / self.placement.physical

    def to_physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        if self.even:
            return self.placement.spread(topk_ids, self.group.index * topk_ids.numel())
        return self.placement.to_physical(topk_ids, self.group.index)

    @property
    def choosing(self) -> Replicas | None:
        """What :func:`.pack_tokens` does the same with as it packs; None: only :meth:`to_physical` does it."""
        return None if self.even else self.placement.choosing(self.group.index)

    def received(self, topk_ids: torch.Tensor, local_pairs: int | None = None) -> tuple[torch.Tensor, int | None]:
        """``topk_ids`` and ``first`` of :class:`.Received`, for physical experts that have come. ``local_pairs``:
        number of pairs with experts of this rank, if the host knows it."""
        return topk_ids, self.placement.first[self.group.index]

    def counts(self, sent: torch.Tensor) -> Callable[[], tuple[RecvPlan, int]]:
        """Tells every rank what comes to it. In a dispatch of one round, the host waits for nothing else. ``sent``:
        int32 ``[size, 2]``, to each rank: tokens, and its pairs in them. Returns a function that waits, and returns the
        sizes and the number of pairs of the most loaded rank."""
        size, index = self.group.size, self.group.index
        all_ranks = self.group.all_gather(sent).view(size, size, 2)  # from, to
        largest = all_ranks[..., 1].sum(dim=0, dtype=torch.int32).amax()
        read = download(torch.cat((sent, all_ranks[:, index], largest.expand(1, 2))))

        wait: Callable[[], tuple[RecvPlan, int]] = this_thread.as_one(partial, _plan, read)
        return wait

    def plans(self, group: Group, sent: torch.Tensor) -> list[RecvPlan]:
        """The plan of every round, whose rows and pairs ``sent [rounds, size, 2]`` go to each rank of a group; the host
        waits."""
        received = group.all_to_all(sent.transpose(0, 1).contiguous()).transpose(0, 1)
        both = download(torch.stack((sent, received), dim=1))()
        return [RecvPlan.of(*one) for one in both]

    def ways(self, sent: torch.Tensor, groups: NodeGroups, takers: torch.Tensor) -> Callable[[], list[Way]]:
        """Tells every rank what comes to it along its rail and inside its node, in every round along the rail; returns
        a function that waits. ``sent``: int32 ``[rounds, size, 4]`` (:func:`.by_node.counts_in_rounds`)."""
        by_pair = self.group.all_gather(sent).view(self.group.size, *sent.shape)
        read = this_thread.as_one(to_host, by_pair)
        wait: Callable[[], list[Way]] = this_thread.as_one(partial, _ways, read, self.group.index, takers, groups)
        return wait

    def local_pairs(self, local_ids: torch.Tensor, together: int) -> list[int]:
        """Number of received pairs with experts of this rank, of each ``together`` tokens; the host waits for it.
        ``local_ids``: int32 ``[R, k]``, counted within this rank's, −1 for those of other ranks."""
        if missing := -len(local_ids) % together:
            local_ids = F.pad(local_ids, (0, 0, 0, missing), value=-1)
        return download((local_ids.view(-1, together * local_ids.shape[1]) >= 0).sum(dim=1))()


def _plan(read: Callable[[], list[list[int]]]) -> tuple[RecvPlan, int]:
    *rows, largest = read()
    size = len(rows) // 2
    return RecvPlan.of(rows[:size], rows[size:]), largest[0]


def _ways(read: Callable[[], torch.Tensor], rank: int, takers: torch.Tensor, groups: NodeGroups) -> list[Way]:
    return [Way.of(counts, rank, takers, groups) for counts in read().unbind(dim=1)]
