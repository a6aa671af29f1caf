"""What a dispatch of tokens to experts is, whatever way they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from dsa_engine.kernels.moe.pack_tokens import tokens_of
from dsa_engine.kernels.moe.unpack_choices import unpack_choices
from dsa_engine.parallel.experts.placement import ExpertPlacement

MoeDispatch = Literal["all_to_all", "all_gather"]


class Received(NamedTuple):
    """Tokens at the rank that holds their experts.

    ``experts`` counts within this rank's experts, −1 for a choice that lies elsewhere. ``served_fraction`` is the part
    of the choices that is served here where routing is balanced, and ``served`` how many are, where the host has come
    to know it.
    """

    tokens: torch.Tensor  # [R, hidden]
    experts: torch.Tensor  # [R, k] int32
    weights: torch.Tensor  # [R, k] float32
    served_fraction: float
    served: int | None = None


class Dispatch(ABC):
    """Tokens on their way to their experts and back, in one round or in several: :meth:`arrive`, the experts,
    :meth:`give_back`. :meth:`combine` comes after the last. Every rank of the group takes part in all that travels.

    Attributes:
        rounds: how many there are; the same on every rank where tokens travel in each.
    """

    rounds: int

    @abstractmethod
    def arrive(self, number: int) -> Received:
        """The tokens that come to this rank in a round; to be called once."""

    @abstractmethod
    def give_back(self, number: int, sums: torch.Tensor) -> None:
        """Takes the weighted sums of this rank's experts, ``[R, hidden]``, for the tokens of a round."""

    @abstractmethod
    def combine(self) -> torch.Tensor:
        """The sums over all ranks for this rank's own tokens, ``[T, hidden]``."""


class SingleRound(Dispatch):
    """One round: ``back`` makes the sums for this rank's own tokens of those for the tokens that arrived."""

    rounds = 1

    def __init__(self, arrived: Received, back: Callable[[torch.Tensor], torch.Tensor]):
        self._arrived: Received | None = arrived
        self._back = back

    def arrive(self, number: int) -> Received:
        arrived, self._arrived = self._arrived, None  # its memory is free as soon as the experts are done with it
        assert arrived is not None
        return arrived

    def give_back(self, number: int, sums: torch.Tensor) -> None:
        self._own = self._back(sums)

    def combine(self) -> torch.Tensor:
        return self._own


def unpacked(
    packed: torch.Tensor, like: torch.Tensor, k: int, placement: ExpertPlacement, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of packed rows: tokens as ``like`` has them, choices counted within the experts of ``rank``, and weights."""
    hidden, dtype = like.shape[1], like.dtype
    choices = unpack_choices(packed, hidden, dtype, k, placement.first(rank), placement.count(rank))
    return tokens_of(packed, hidden, dtype), *choices
