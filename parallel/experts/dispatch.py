"""The interface of a dispatch: tokens travel to the ranks that hold their experts, and weighted sums travel back.

`all_to_all.py` and `all_gather.py` are the two ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from dsa_engine.kernels.moe.pack_tokens import tokens_of
from dsa_engine.kernels.moe.unpack_choices import unpack_choices
from dsa_engine.parallel.experts.placement import ExpertPlacement


class Received(NamedTuple):
    """Tokens at the rank that holds their experts.

    ``experts`` are indices among this rank's experts; −1 is a choice that another rank serves. ``served_fraction`` is
    the part of the choices that this rank serves under balanced routing, and ``served`` their number, if the host knows
    it.
    """

    tokens: torch.Tensor  # [R, hidden]
    experts: torch.Tensor  # [R, k] int32
    weights: torch.Tensor  # [R, k] float32
    served_fraction: float
    served: int | None = None


class Dispatch(ABC):
    """Tokens on their way to their experts and back, in one round or several.

    In each round a rank calls :meth:`receive`, runs its experts, and calls :meth:`send_back`; after the last one it
    calls :meth:`combine`. Every rank of the group takes part in each transfer.

    Attributes:
        rounds: number of rounds; the same on every rank if tokens travel in each.
    """

    rounds: int

    @abstractmethod
    def receive(self, number: int) -> Received:
        """The tokens that come to this rank in a round; called once for each."""

    @abstractmethod
    def send_back(self, number: int, sums: torch.Tensor) -> None:
        """Takes the weighted sums ``[R, hidden]`` of this rank's experts for the tokens of a round."""

    @abstractmethod
    def combine(self) -> torch.Tensor:
        """The sums over all ranks for this rank's own tokens, ``[T, hidden]``."""


class SingleRound(Dispatch):
    """One round; ``combine`` makes the sums for this rank's own tokens from those for the received tokens."""

    rounds = 1

    def __init__(self, received: Received, combine: Callable[[torch.Tensor], torch.Tensor]):
        self._received: Received | None = received
        self._combine = combine

    def receive(self, number: int) -> Received:
        received, self._received = self._received, None  # its memory is free as soon as the experts are done with it
        assert received is not None
        return received

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        self._own = self._combine(sums)

    def combine(self) -> torch.Tensor:
        return self._own


def unpacked(
    packed: torch.Tensor, like: torch.Tensor, k: int, placement: ExpertPlacement, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed rows as tokens (width and dtype of ``like``), choices as indices among ``rank``'s experts, and weights."""
    hidden, dtype = like.shape[1], like.dtype
    choices = unpack_choices(packed, hidden, dtype, k, placement.first(rank), placement.count(rank))
    return tokens_of(packed, hidden, dtype), *choices
