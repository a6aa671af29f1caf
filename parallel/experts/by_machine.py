"""The dispatch by machines: a token crosses to a machine once, however many ranks serve it there.

A *rail* is a group with one rank of every machine (or more, where machines differ in size). A token travels along its
rail to each machine that serves it, and is passed on inside by an all-to-all (`all_to_all.py`). The sums of a machine's
ranks are added in float32, in the order of the token's choices, and cross back as one row in the tokens' dtype; those
of the machines are added in float32 at home.

The number of rounds does not change a bit. In float32 the sums differ from those of the all-to-all by their order only;
in bfloat16 a machine's sum is rounded once more before it crosses.

The rows that come along the rail are not cut into rounds: they are at most the rail's ranks times the tokens of a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsa_engine.kernels.moe.combine import combine as weighted_sum
from dsa_engine.kernels.moe.expert_order import Order
from dsa_engine.kernels.moe.pack_tokens import pack_tokens, tokens_of
from dsa_engine.kernels.moe.unpack_choices import unpack_choices
from dsa_engine.parallel.experts.dispatch import Dispatch, Received
from dsa_engine.parallel.group import Group


def rails_of(machines: Sequence[int]) -> list[list[int]]:
    """The ranks of each rail: there are as many rails as the smallest machine has ranks, and each machine has a rank in
    every rail."""
    count = min(Counter(machines).values())
    taken: Counter[int] = Counter()
    rails: list[list[int]] = [[] for _ in range(count)]
    for rank, machine in enumerate(machines):
        rails[taken[machine] % count].append(rank)
        taken[machine] += 1
    return rails


def peers_of(rank: int, machines: Sequence[int]) -> dict[int, int]:
    """By machine, the rank that takes the tokens of ``rank`` there: one of its rail; ``rank`` itself at home."""
    (rail,) = [rail for rail in rails_of(machines) if rank in rail]
    home = [one for one in rail if machines[one] == machines[rank]].index(rank)
    peers = {}
    for machine in set(machines):
        there = [one for one in rail if machines[one] == machine]
        peers[machine] = there[home % len(there)]
    return peers | {machines[rank]: rank}


@dataclass(frozen=True)
class MachineGroups:
    """The groups of one rank.

    Attributes:
        machine: the ranks of its machine.
        rail: the ranks of its rail.
        machines: the machine of every rank.
    """

    machine: Group
    rail: Group
    machines: tuple[int, ...]

    @property
    def peers(self) -> list[int]:
        """By rank, the rank of this rail that takes this rank's tokens for it."""
        peers = peers_of(self.rail.ranks[self.rail.index], self.machines)
        return [peers[machine] for machine in self.machines]

    @property
    def takers(self) -> list[int]:
        """By rank, the rank of this machine that takes its tokens."""
        home = self.machines[self.rail.ranks[self.rail.index]]
        return [peers_of(rank, self.machines)[home] for rank in range(len(self.machines))]

    @property
    def inner_ranks(self) -> list[int]:
        """By rank, its index in this machine, −1 for those of others."""
        return [self.machine.ranks.index(r) if r in self.machine.ranks else -1 for r in range(len(self.machines))]


class ByMachineDispatch(Dispatch):
    """Tokens on their way along the rail, then inside the machine, and back.

    Args:
        order: rows along the rail, sorted by rank.
        inside: starts the dispatch inside the machine, for packed tokens ``[R, hidden]``, physical experts and weights.
        send, receive: rows to and from each rank of the rail.
        inner_rounds: rounds inside the machine.
    """

    def __init__(
        self,
        rail: Group,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        order: Order,
        inside: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Dispatch],
        send: list[int],
        receive: list[int],
        inner_rounds: int,
        physical: int,
    ):
        self._rail, self._send, self._receive = rail, send, receive
        self._like, self._k, self._physical = tokens[:0], experts.shape[1], physical
        self._order, self._inside, self._inner_rounds = order, inside, inner_rounds
        packed = pack_tokens(tokens, experts, weights, source=order.tokens[: sum(send)])
        into = packed.new_empty(sum(receive), packed.shape[1])
        wait = rail.all_to_all_async(packed, into, send, receive)
        self._coming: Callable[[], torch.Tensor] = lambda: wait() or into
        self._dispatch: Dispatch | None = None

    @property
    def rounds(self) -> int:
        return self._inner_rounds

    def receive(self, number: int) -> Received:
        if self._dispatch is None:
            packed, hidden, dtype = self._coming(), self._like.shape[1], self._like.dtype
            del self._coming
            choices = unpack_choices(packed, hidden, dtype, self._k, 0, self._physical)
            self._dispatch = self._inside(tokens_of(packed, hidden, dtype), *choices)
        return self._dispatch.receive(number)

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        assert self._dispatch is not None
        self._dispatch.send_back(number, sums)
        if number + 1 == self.rounds:
            rows = self._dispatch.combine()
            self._dispatch = None
            self._returned = rows.new_empty(sum(self._send), rows.shape[1])
            self._returning = self._rail.all_to_all_async(rows, self._returned, self._receive, self._send)

    def combine(self) -> torch.Tensor:
        self._returning()
        return weighted_sum(self._returned, self._order.pair_rows)
