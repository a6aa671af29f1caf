"""The interface of a dispatch: tokens travel to the ranks that hold their experts, and weighted sums travel back.

`all_to_all.py`, `all_gather.py` and `by_node.py` are the ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from dsa_engine.kernels.moe.expert_order import local_topk_ids
from dsa_engine.kernels.moe.pack_tokens import tokens_of, topk_of
from dsa_engine.parallel.side_stream import SideStream


class Received(NamedTuple):
    """Tokens at the rank that holds their experts.

    ``topk_ids`` are physical experts, of which this rank's begin with ``first``; −1 is none. Without ``first`` they are
    counted within this rank's, and −1 is an expert of another rank. ``local_fraction`` is the part of the token-expert
    pairs with experts of this rank under balanced routing, and ``local_pairs`` their number, if the host knows it. Rows
    of tokens, ``topk_ids`` and ``topk_weights`` need not be contiguous.
    """

    tokens: torch.Tensor  # [R, width], as they were sent: numbers, or words with codes and scales
    topk_ids: torch.Tensor  # [R, k] int32
    topk_weights: torch.Tensor  # [R, k] float32
    local_fraction: float
    local_pairs: int | None = None
    first: int | None = None

    def local(self, count: int) -> torch.Tensor:
        """``topk_ids`` counted within the ``count`` experts of this rank, −1 for those of other ranks."""
        return local_topk_ids(self.topk_ids, count, self.first)


class Dispatch(ABC):
    """Tokens on their way to their experts and back, in one round or several.

    A dispatch is made with the tokens of its first round on their way, but for :class:`OverlappedDispatch`. In each
    round a rank calls :meth:`receive`, runs its experts, and calls :meth:`send_back`; after the last one it calls
    :meth:`combine`. What travels does so beside the work that is launched between these calls, on the stream of the
    collective. Every rank of the group takes part in each transfer, and makes all calls of all its dispatches in the
    same order.
    """

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Number of rounds; the same on every rank if tokens travel in each. It may wait for the first tokens."""

    @abstractmethod
    def receive(self, number: int) -> Received:
        """Waits for the tokens that come to this rank in a round; called once for each, in order."""

    @abstractmethod
    def send_back(self, number: int, sums: torch.Tensor) -> None:
        """Starts to return the weighted sums ``[R, hidden]`` of this rank's experts for the tokens of a round, and then
        the next round, which so has the memory of the last one."""

    @abstractmethod
    def combine(self) -> torch.Tensor:
        """Waits for the sums over all ranks for this rank's own tokens, ``[T, hidden]``."""


class NoDispatch(Dispatch):
    """The tokens of a rank that holds all experts."""

    rounds = 1

    def __init__(self, received: Received):
        self._received = received

    def receive(self, number: int) -> Received:
        return self._received

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        self._sums = sums

    def combine(self) -> torch.Tensor:
        return self._sums


class OverlappedDispatch(Dispatch):
    """Tokens that travel beside what the main stream is given between the making of the dispatch and :meth:`send`, so
    that the device has work while the host waits for counts.

    Args:
        steps: starts to exchange counts; then waits for them and makes the dispatch. It holds what the dispatch reads.
        side: the stream on which tokens are packed, sent and received.
    """

    def __init__(self, steps: Iterator[Dispatch | None], side: SideStream):
        self._steps, self._side = steps, side
        next(steps)
        side.mark()

    def send(self) -> None:
        """Waits for the counts, and sends the tokens."""

        def work() -> tuple[Dispatch, Received]:
            dispatch = next(one for one in self._steps if one is not None)
            return dispatch, dispatch.receive(0)

        self._sent = self._side.run(work, from_mark=True)

    @cached_property
    def rounds(self) -> int:
        self._dispatch, self._first = self._sent()
        del self._sent
        return self._dispatch.rounds

    def receive(self, number: int) -> Received:
        return self._dispatch.receive(number) if number else self._first

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        if number == 0:
            del self._first  # not before: its memory belongs to the side stream, which may have been given more
        self._dispatch.send_back(number, sums)

    def combine(self) -> torch.Tensor:
        sums = self._dispatch.combine()
        self._side.mark()  # the last use of what the side stream has made
        return sums


def unpacked(packed: torch.Tensor, like: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (width and dtype of ``like``), physical experts and weights of packed rows: views."""
    hidden, dtype = like.shape[1], like.dtype
    return tokens_of(packed, hidden, dtype), *topk_of(packed, hidden, dtype, k)
