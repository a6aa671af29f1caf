"""The all-to-all dispatch: only what is needed travels, in as many rounds as keep a rank's memory bounded.

A token goes once to every rank that holds some of its experts. How many come to a rank depends on the routing, and
where it is skewed, nearly all tokens of all ranks may want the same one. So ranks tell each other how many
token-expert pairs each of them is to serve, and where the most loaded one has more than fit at a time, all ranks send
in rounds: skew costs time and not memory. A rank's own sums come back one by one and are added at the end, in the order
of a token's choices: the same bits, however many rounds there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsa_engine.kernels.moe.combine import combine as weighted_sum
from dsa_engine.kernels.moe.expert_order import Order, expert_order
from dsa_engine.kernels.moe.pack_tokens import pack_tokens
from dsa_engine.kernels.moe.token_ranks import token_ranks
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.parallel.experts.dispatch import Dispatch, Received, unpacked
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group


class RecvPlan(NamedTuple):
    """What the host has to know of an all-to-all."""

    send: list[int]  # tokens of this rank that go to each
    receive: list[int]  # tokens that come from each
    served: int  # choices of these that this rank's experts serve


class SendPlan(NamedTuple):
    """Which of a rank's tokens go where: a row is a token on its way to a rank."""

    order: Order  # rows sorted by rank and, within one, by token
    ranks: torch.Tensor  # [T, k] int32: of every choice, −1 where nobody serves it
    counts: torch.Tensor  # [size, 2] int32: rows to each rank, and choices of them that it serves

    @classmethod
    def of(cls, experts: torch.Tensor, rank_of: torch.Tensor, size: int) -> SendPlan:
        """Of the physical experts ``[T, k]``; see :func:`~dsa_engine.kernels.moe.token_ranks.token_ranks`."""
        ranks, first, counts = token_ranks(experts, rank_of, size)
        return cls(expert_order(first, size), ranks, counts)


class Rounds(NamedTuple):
    """The rows in the order in which they travel: by round, then by rank, then by token."""

    source: torch.Tensor  # [rows] the token of each
    places: torch.Tensor  # [T, k] int32: the row of every choice that is the first of its rank, −1 of others
    counts: torch.Tensor  # [rounds, size, 2] int32


def rounds_needed(most: int, most_pairs: int, size: int, k: int) -> int:
    """How many rounds keep every rank at ``most_pairs`` token-expert pairs a round, or at ``size · (k + 1)`` where that
    is more: the most loaded one has ``most``.

    What a rank sends another one is cut evenly, up to one choice and the other choices of its token.
    """
    if most <= most_pairs:
        return 1
    return cdiv(most, max(size, most_pairs - size * k))


def in_rounds(sendings: SendPlan, rows: int, rounds: int) -> Rounds:
    """Cuts what goes to each rank into ``rounds`` parts of as many choices; ``rows`` is how many rows there are."""
    order, ranks, counts = sendings
    size, device = len(counts), ranks.device
    source = order.tokens[:rows]
    rank = torch.searchsorted(order.row_ends, torch.arange(rows, dtype=torch.int32, device=device), right=True)
    served = (ranks[source] == rank[:, None]).sum(dim=1)
    choices = counts[:, 1].long()
    before = served.cumsum(0) - served - (choices.cumsum(0) - choices)[rank]  # choices ahead of a row, of its rank's
    number = before * rounds // choices[rank].clamp(min=1)
    by_round = number.argsort(stable=True)
    moved = torch.empty_like(by_round).scatter_(0, by_round, torch.arange(rows, device=device)).int()
    places = order.pair_rows
    if rows:
        places = moved[places.clamp(min=0)].masked_fill_(places < 0, -1)
    each = torch.zeros(rounds * size, 2, dtype=torch.int32, device=device)
    values = torch.stack((torch.ones_like(served), served), dim=1).int()
    each.scatter_add_(0, (number * size + rank)[:, None].expand(rows, 2), values)
    return Rounds(source[by_round], places, each.view(rounds, size, 2))


class AllToAllDispatch(Dispatch):
    """Tokens to their experts and back, in the order of ``source`` (:class:`Rounds`), ``arrivals`` of each round."""

    def __init__(
        self,
        group: Group,
        placement: ExpertPlacement,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        source: torch.Tensor,
        places: torch.Tensor,
        arrivals: list[RecvPlan],
    ):
        self.rounds = len(arrivals)
        self._group, self._placement = group, placement
        self._tokens, self._experts, self._weights = tokens, experts, weights
        self._source, self._places = source, places
        self._arrivals = arrivals
        self._returned: torch.Tensor | None = None  # [rows, hidden]: at most k a token, however skewed the routing is
        self._first = 0  # row of the round that is under way

    def arrive(self, number: int) -> Received:
        send, receive, served = self._arrivals[number]
        group, k = self._group, self._experts.shape[1]
        source = self._source[self._first : self._first + sum(send)]
        packed = pack_tokens(self._tokens, self._experts, self._weights, source=source)
        return Received(
            *unpacked(group.all_to_all(packed, send, receive), self._tokens, k, self._placement, group.index),
            max(1 / k, self._placement.fraction(group.index)),  # a token comes for one choice at least
            served,
        )

    def give_back(self, number: int, sums: torch.Tensor) -> None:
        send, receive, _ = self._arrivals[number]
        returned = self._group.all_to_all(sums, receive, send)
        if self.rounds == 1:
            self._returned = returned
            return
        if self._returned is None:
            self._returned = returned.new_empty(len(self._source), returned.shape[1])
        last = self._first + len(returned)
        self._returned[self._first : last] = returned
        self._first = last

    def combine(self) -> torch.Tensor:
        assert self._returned is not None
        return weighted_sum(self._returned, self._places)
