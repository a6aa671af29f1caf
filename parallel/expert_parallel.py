"""Expert parallelism: every rank of the group holds a part of the routed experts (`placement.py`).

A dispatch brings tokens to the ranks that hold their experts, each with its choices and weights in one row
(`kernels/packed_tokens.py`); its ``combine`` brings the sums back. Both dispatches send a token to a rank at most once,
however many of that rank's experts it has chosen.

* "all_to_all": only what is needed travels; the counts depend on the routing, and the host waits for them once; sums
  add in float32, in the order of a token's choices, so the same bits each time.
* "all_gather": every rank gets every token; shapes depend on the batch only; sums add in the tokens' dtype, under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsa_engine.kernels.packed_tokens import pack_tokens, tokens_of, unpack_choices
from dsa_engine.kernels.permute import combine as weighted_sum
from dsa_engine.kernels.permute import expert_order
from dsa_engine.kernels.transfer import download
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from dsa_engine.parallel.config import MoeDispatch


class Dispatched(NamedTuple):
    """Tokens at the rank that holds their experts, and the way back.

    ``experts`` counts within this rank's experts, −1 for a choice that lies elsewhere. ``combine`` takes the weighted
    sums of this rank's experts ``[R, hidden]`` and returns the sums over all ranks for this rank's own tokens
    ``[T, hidden]``. ``served_fraction`` is the part of the choices that is served here where routing is balanced, and
    ``served`` how many are, where the host has come to know it.
    """

    tokens: torch.Tensor  # [R, hidden]
    experts: torch.Tensor  # [R, k] int32
    weights: torch.Tensor  # [R, k] float32
    combine: Callable[[torch.Tensor], torch.Tensor]
    served_fraction: float
    served: int | None = None


class Arrivals(NamedTuple):
    """What the host has to know of an all-to-all."""

    send: list[int]  # tokens of this rank that go to each
    receive: list[int]  # tokens that come from each
    served: int  # choices of these that this rank's experts serve


class ExpertParallel:
    """The experts of a model, divided over a group; one rank's view.

    Attributes:
        group: the ranks that hold them.
        placement: which of them each rank holds.
    """

    def __init__(self, group: Group, placement: ExpertPlacement):
        self.group = group
        self.placement = placement

    @property
    def held(self) -> tuple[int, ...]:
        """The logical experts of this rank, in the order of its weights."""
        return self.placement.held[self.group.index]

    def dispatch(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        method: MoeDispatch,
        most_tokens: int,
    ) -> Dispatched:
        """Brings each of ``tokens [T, hidden]`` to its ``experts [T, k]``; every rank of the group takes part.

        Args:
            experts: logical experts, int32; −1 is nobody.
            weights: ``[T, k]`` float32.
            method: "all_to_all" or "all_gather".
            most_tokens: the largest token count of a rank of the group.
        """
        experts = self.to_physical(experts)
        if self.group.size == 1:
            return Dispatched(tokens, experts, weights, lambda sums: sums, 1.0)
        if method == "all_gather":
            return self._all_gather(tokens, experts, weights, most_tokens)
        if method == "all_to_all":
            return self._all_to_all(tokens, experts, weights)
        raise ValueError(f"there is no dispatch {method!r}")

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        """The physical experts ``[T, k]`` that serve this rank's choices of logical ones."""
        return self.placement.to_physical(experts)

    def exchange_counts(self, sent: torch.Tensor) -> Arrivals:
        """Tells every rank what comes to it: the one thing in a dispatch that the host waits for.

        Args:
            sent: int32 ``[size, 2]``, to each rank: tokens, and choices of them that it serves.
        """
        size = self.group.size
        rows = download(torch.cat((sent, self.group.all_to_all(sent))))()
        tokens = [row[0] for row in rows]
        return Arrivals(tokens[:size], tokens[size:], sum(row[1] for row in rows[size:]))

    def _all_to_all(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Dispatched:
        group, k = self.group, experts.shape[1]
        owners = self.placement.owners(experts)
        by_rank = expert_order(_first_of_each(owners, group.size), group.size)
        choices = torch.zeros(group.size + 1, dtype=torch.int32, device=tokens.device)  # the last are nobody's
        choices.scatter_add_(0, owners.flatten(), choices.new_ones(()).expand(owners.numel()))
        counts = by_rank.ends.diff(prepend=by_rank.ends.new_zeros(1))
        send, receive, served = self.exchange_counts(torch.stack((counts, choices[:-1]), dim=1))
        source = by_rank.tokens[: sum(send)]  # by rank, then by token
        arrived = group.all_to_all(pack_tokens(tokens, experts, weights, source=source), send, receive)

        def combine(sums: torch.Tensor) -> torch.Tensor:
            return weighted_sum(group.all_to_all(sums, receive, send), by_rank.places)

        return Dispatched(
            *self._unpacked(arrived, tokens, k),
            combine,
            max(1 / k, self._fraction_held),  # a token comes for one choice at least
            served,
        )

    def _all_gather(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, most_tokens: int
    ) -> Dispatched:
        """Padding has no experts, so it takes no part in any expert's work."""
        group, (count, k) = self.group, experts.shape
        gathered = group.all_gather(pack_tokens(tokens, experts, weights, rows=most_tokens))

        def combine(sums: torch.Tensor) -> torch.Tensor:
            return group.reduce_scatter(sums)[:count]

        return Dispatched(*self._unpacked(gathered, tokens, k), combine, self._fraction_held)

    def _unpacked(
        self, packed: torch.Tensor, like: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens as ``like`` has them, their experts counted within this rank's, and their weights."""
        hidden, dtype = like.shape[1], like.dtype
        first, held = self.placement.first(self.group.index), len(self.held)
        return tokens_of(packed, hidden, dtype), *unpack_choices(packed, hidden, dtype, k, first, held)

    @property
    def _fraction_held(self) -> float:
        return len(self.held) / self.placement.experts


def _first_of_each(owners: torch.Tensor, nobody: int) -> torch.Tensor:
    """``owners [T, k]`` as int32, −1 for ``nobody`` and where an earlier choice of the token has the same owner."""
    earlier = torch.ones(owners.shape[1], owners.shape[1], dtype=torch.bool, device=owners.device).tril(-1)
    again = ((owners[:, :, None] == owners[:, None, :]) & earlier).any(dim=-1)
    return owners.int().masked_fill_(again | (owners == nobody), -1)
