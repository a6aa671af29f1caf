"""The interface of a dispatch: tokens travel to the ranks that hold their experts, and weighted sums travel back.

A :class:`Dispatcher` is a way to do so, for all layers of a mesh; it starts a :class:`Dispatch` in each layer. A token
travels with its `topk_ids` and `topk_weights` in one row (`kernels/moe/pack_tokens.py`), to a rank at most once, even
if it has chosen several of that rank's experts. `experts/__init__.py` has the names of all dispatchers.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from dsa_engine.kernels.moe.expert_order import local_topk_ids
from dsa_engine.kernels.runtime.kernel import call, this_thread
from dsa_engine.kernels.runtime.transfer import SideStream
from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.experts.placement import ExpertParallel, NodeGroups
from dsa_engine.parallel.group import Group

Sends = list[Callable[[], None]]


class Routed(NamedTuple):
    """A rank's tokens and what their router has chosen."""

    tokens: torch.Tensor  # [T, width]: numbers or words with codes and scales, as the experts take them
    topk_ids: torch.Tensor  # [T, k] int32, −1: no expert; logical ones, until a dispatch makes them physical
    topk_weights: torch.Tensor  # [T, k] float32


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

    A dispatch is made with the tokens of its first round on their way, but for :class:`OverlappedDispatch`. They travel
    beside the work that is launched between the calls, on the stream of the collective. Every rank of the group takes
    part in each transfer, and makes all calls of all its dispatches in the same order.
    """

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Number of rounds; the same on every rank if tokens travel in each. Known when the first have come."""

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


class StepSizes(NamedTuple):
    """What limits a step's dispatch, the same on all ranks."""

    max_tokens: int  # the largest token count of a rank of the group
    # Bound on the token-expert pairs of a rank in a round (:func:`.rounds_needed`, :func:`.parts_of`). More pairs take
    # several rounds, and if there may be more, the host waits for their number.
    max_pairs: int = sys.maxsize
    sum_bytes: int | None = None  # of a token's sum in the run's dtype; None: those of the token


class ModelSizes(NamedTuple):
    """What a library asks before it takes a model's tokens."""

    hidden: int
    experts: int  # physical ones
    top_k: int
    decode_rows: int  # largest usual number of tokens of a rank in a decode step
    dtype: torch.dtype  # of the run


class PrefillSizes(NamedTuple):
    """The largest prefill of a rank, by which memory is counted."""

    tokens: int
    k: int
    ranks: int
    chunk: int | None  # ``moe_chunk_size``
    there: int  # bytes of a token on its way, in the run's dtype
    back: int  # bytes of a sum
    words: bool  # whether tokens travel in another form than sums

    @property
    def pairs(self) -> int:
        """Token-expert pairs of a rank under even routing."""
        return self.tokens * self.k


class Memory(NamedTuple):
    """What a prefill's dispatch may take beyond one with even routing."""

    held: int  # bytes of results of earlier rounds, where even routing has one round, and of rows between levels
    pairs: int  # largest number of pairs of a round, if ``moe_chunk_size`` is given
    rounds: int  # of even routing
    rows: int  # tokens and sums that each further pair may bring


class Dispatcher(ABC):
    """A way of tokens to their experts, for all layers of a mesh."""

    static_shapes = False  # whether those of a step do not depend on the routing, so that the host need not wait for it

    def prepare(self, sizes: ModelSizes) -> None:  # noqa: B027
        """Called once, before any layer is made; ``ValueError`` if it does not take such a model here."""

    def for_decode(self) -> Dispatcher:
        return self

    def is_new(self, tokens: int) -> bool:
        """Whether a prefill with so many tokens on a rank would exchange them in a way that none has gone."""
        return False

    def takes_words(self, blockwise: bool) -> bool:
        """Whether tokens may travel as words of codes and scales; ``blockwise``: with a scale for each 128 codes."""
        return True

    @abstractmethod
    def memory(self, sizes: PrefillSizes) -> Memory: ...

    @abstractmethod
    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        """Brings each token to its experts; every rank of the group takes part. ``unsent``: gets
        :meth:`OverlappedDispatch.send` of tokens whose counts the host has to know; None: they are sent."""


class Ranks(Protocol):
    """What a dispatcher is made from: the part of a :class:`.mesh.Mesh` that concerns experts."""

    @property
    def config(self) -> ParallelConfig: ...

    device: torch.device
    nodes: tuple[int, ...]
    node_groups: NodeGroups | None
    ep: Group

    @property
    def is_leader(self) -> bool: ...


class Alone(Dispatcher):
    """The tokens of a rank that holds all experts stay."""

    static_shapes = True

    def takes_words(self, blockwise: bool) -> bool:
        return False

    def memory(self, sizes: PrefillSizes) -> Memory:
        return Memory(held=0, pairs=0, rounds=1, rows=0)

    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        tokens, topk_ids, topk_weights = routed
        return NoDispatch(Received(tokens, experts.to_physical(topk_ids), topk_weights, 1.0))


class NoDispatch(Dispatch):
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
    """Tokens that travel on the stream ``side`` beside what the main stream is given between the making of the dispatch
    and :meth:`send`, which is added to ``unsent``, so that the device has work while the host waits for counts.
    ``counted``: waits for the counts, which are on their way, and makes the dispatch; it holds what the dispatch
    reads."""

    rounds = 1

    def __init__(self, counted: Callable[[], Dispatch], side: SideStream, unsent: Sends):
        self._counted, self._side = counted, side
        self._dispatch: Dispatch
        side.mark()
        unsent.append(self.send)

    def send(self) -> None:
        def work() -> tuple[Dispatch, Received]:
            dispatch = self._counted()
            return dispatch, dispatch.receive(0)

        self._sent = self._side.run(work, from_mark=True)

    def receive(self, number: int) -> Received:
        if number:
            return self._dispatch.receive(number)
        # Held until sums return: its memory belongs to the side stream, which may be given more.
        self._dispatch, self._first = self._sent()
        del self._sent
        self.rounds = self._dispatch.rounds
        return self._first

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        if number == 0:
            del self._first
        self._dispatch.send_back(number, sums)

    def combine(self) -> torch.Tensor:
        sums = self._dispatch.combine()
        self._side.mark()  # the last use of what the side stream has made
        return sums


class CountedDispatcher(Dispatcher):
    """A dispatcher of tokens whose counts depend on the routing: ranks exchange these, and the host waits."""

    @abstractmethod
    def count(self, experts: ExpertParallel, routed: Routed, step: StepSizes) -> Callable[[], Dispatch]:
        """Starts to exchange counts, of tokens with physical experts; returns a function that waits for them, and sends
        the tokens of the first round: made by :func:`.as_one`, for the layers that repeat this one."""

    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        counted = self.count(experts, routed._replace(topk_ids=experts.to_physical(routed.topk_ids)), step)
        started: Dispatch = (
            this_thread.as_one(call, counted)
            if unsent is None
            else this_thread.as_one(OverlappedDispatch, counted, experts.side_stream, unsent)
        )
        return started
