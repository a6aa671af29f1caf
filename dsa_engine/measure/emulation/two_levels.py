"""What comes to one rank in a dispatch by machine, computed from the choices of the tokens of all ranks.

Every rank's tokens are planned and cut into rounds by the code that a true rank runs (`parallel/experts/by_machine.py`,
`parallel/experts/all_to_all.py`), so counts are exact, also in several rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from dsa_engine.measure.emulation.assigned_experts import StepChoices
from dsa_engine.parallel.experts.all_to_all import RecvPlan, Rounds, SendPlan, in_rounds
from dsa_engine.parallel.experts.by_machine import MachineGroups, Way, counts_in_rounds, way_numbers
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.experts.traffic import peers_of


class Arriving(NamedTuple):
    """Tokens that come to this rank in a round inside its machine.

    Attributes:
        choices: ``[R, k]``, counted within this rank's experts.
        counts: number of tokens from each rank of the machine.
    """

    choices: torch.Tensor
    counts: list[int]


class AllPeers:
    """The tables of all ranks, which do not depend on the step.

    Attributes:
        groups: those of the emulated rank.
        peers: int32 ``[ranks, physical]``, the rank that takes a rank's tokens for an expert along the rail.
        takers: the rank of this machine that takes the tokens of each rank.
        inner: int32 ``[physical]``, the index in this machine of an expert's rank, −1 for experts of others.
    """

    def __init__(self, groups: MachineGroups, placement: ExpertPlacement):
        machines, home = groups.machines, groups.machines[groups.machine.ranks[0]]
        self.groups, device = groups, placement.rank_of.device
        by_machine = [peers_of(rank, machines) for rank in range(len(machines))]
        self.takers = [peers[home] for peers in by_machine]
        by_rank = [[peers[machine] for machine in machines] for peers in by_machine]
        inside = {rank: index for index, rank in enumerate(groups.machine.ranks)}
        by_rank.append([inside.get(rank, -1) for rank in range(len(machines))])
        tables = torch.tensor(by_rank, dtype=torch.int32, device=device)[:, placement.rank_of.long()]
        self.peers, self.inner = tables[:-1], tables[-1]


class StepInTwoLevels:
    """The tokens of all ranks of a step, on their way along rails and inside the machine of one rank."""

    def __init__(self, step: StepChoices, tables: AllPeers):
        self.step, self._tables = step, tables
        self._parts = step.physical.split(step.tokens)
        self._cuts: dict[int, list[Rounds]] = {}

    def ways(self, rounds: int) -> list[Way]:
        """The sizes of each of ``rounds`` rounds along the rail, for this rank."""
        cuts = self._cut(rounds)
        counts = [counts_in_rounds(*plans, cut) for plans, cut in zip(self._plans, cuts, strict=True)]
        takers = torch.tensor(self._tables.takers, dtype=torch.int32, device=counts[0].device)
        numbers = way_numbers(torch.stack(counts, dim=1), self.step.rank, takers)
        return [Way.of(row, self._tables.groups) for row in numbers.tolist()]

    def taken(self, taker: int, number: int, rounds: int) -> torch.Tensor:
        """Physical experts ``[R, k]`` of the tokens that come along its rail to a rank of this machine in a round."""
        senders = [rank for rank, to in enumerate(self._tables.takers) if to == taker]
        cuts = self._cut(rounds)
        return torch.cat([self._parts[rank][_to(cuts[rank], taker)[number]] for rank in senders])

    def inside(self, number: int, rounds: int, inner_rounds: int) -> list[Arriving]:
        """What comes inside the machine in each of ``inner_rounds`` rounds, which pass on the tokens of the round
        ``number`` along the rails."""
        machine, inner = self._tables.groups.machine, self._tables.inner
        brought: list[list[torch.Tensor]] = [[] for _ in range(inner_rounds)]
        for taker in machine.ranks:
            choices = self.taken(taker, number, rounds)
            plan = SendPlan.of(choices, inner, machine.size)
            cut = in_rounds(plan, int(plan.counts[:, 0].sum()), inner_rounds)
            for one, rows in zip(brought, _to(cut, machine.index), strict=True):
                one.append(choices[rows])
        placement, rank = self.step.placement, self.step.rank
        return [Arriving(placement.local(torch.cat(parts), rank), [*map(len, parts)]) for parts in brought]

    @cached_property
    def _plans(self) -> list[tuple[SendPlan, SendPlan]]:
        """By rank: plans to the ranks that serve the choices, and to the ranks of the rail that take them."""
        rank_of, size = self.step.placement.rank_of, len(self._parts)
        return [
            (SendPlan.of(part, rank_of, size), SendPlan.of(part, peers, size))
            for part, peers in zip(self._parts, self._tables.peers, strict=True)
        ]

    def _cut(self, rounds: int) -> list[Rounds]:
        """The rows of every rank along its rail."""
        if rounds not in self._cuts:
            along = [plan for _, plan in self._plans]
            self._cuts[rounds] = [in_rounds(plan, int(plan.counts[:, 0].sum()), rounds) for plan in along]
        return self._cuts[rounds]


def plans(rounds: Sequence[RecvPlan], arriving: Sequence[Arriving]) -> list[RecvPlan]:
    """``rounds`` with what is arriving instead of what they would receive."""
    return [
        RecvPlan(one.send, here.counts, int((here.choices >= 0).sum()))
        for one, here in zip(rounds, arriving, strict=True)
    ]


def _to(cut: Rounds, rank: int) -> list[torch.Tensor]:
    """The tokens of the rows to ``rank`` in each round."""
    size = cut.counts.shape[1]
    rows = cut.source.split(cut.counts[..., 0].flatten().tolist())
    return [*rows[rank::size]]
