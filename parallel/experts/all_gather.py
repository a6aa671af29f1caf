"""The all-gather dispatch: every rank gets every token, and a reduce-scatter adds the sums of all ranks.

The bytes that travel do not depend on the routing, but the number of token-expert pairs of a rank does. If they may be
more than fit at a time, they are counted, and the rank's experts take the tokens in rounds: skew costs time and not
memory. Nothing travels between rounds, so each rank has as many as it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

from dsa_engine.kernels.moe.pack_tokens import pack_tokens, unpacked
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.parallel.experts.dispatch import (
    Dispatch,
    Dispatcher,
    Memory,
    PrefillSizes,
    Ranks,
    Received,
    Routed,
    Sends,
    StepSizes,
)
from dsa_engine.parallel.experts.placement import ExpertParallel

# A round is filled in steps of this fraction of its bound, or finer ones.
_PARTS = 16


class Part(NamedTuple):
    """Consecutive gathered tokens, which make a round."""

    first: int
    last: int
    local_pairs: int | None  # their pairs with experts of this rank; None: not counted


def tokens_counted_together(max_pairs: int, max_per_token: int) -> int:
    """Number of consecutive tokens whose local pairs are counted as one number; ``max_per_token``: the largest number
    of experts of a token that a rank may hold."""
    return max(1, max_pairs // (_PARTS * max_per_token))


def parts_of(local_pairs: list[int], together: int, tokens: int, max_pairs: int) -> list[Part]:
    """Cuts ``tokens`` tokens into as few rounds as possible, with about as many local pairs each: at most
    ``max_pairs``, or those of one count if that is larger. ``local_pairs``: those of each ``together`` consecutive
    tokens; the last count may be of fewer tokens."""
    rounds = len(_filled(local_pairs, max_pairs))
    even = cdiv(sum(local_pairs), rounds) + max(local_pairs)
    groups = _filled(local_pairs, min(max_pairs, even))
    offsets = [0, *accumulate(map(len, groups))]
    return [
        Part(first * together, min(last * together, tokens), sum(group))
        for group, first, last in zip(groups, offsets[:-1], offsets[1:], strict=True)
    ]


def _filled(counts: list[int], maximum: int) -> list[list[int]]:
    """Groups of consecutive counts; each has a sum of at most ``maximum`` or is a single count."""
    groups: list[list[int]] = [[]]
    total = 0
    for n in counts:
        if groups[-1] and total + n > maximum:
            groups.append([])
            total = 0
        groups[-1].append(n)
        total += n
    return groups


class AllGather(Dispatcher):
    """Sums add in the tokens' dtype, on their way back."""

    static_shapes = True

    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        """Padding has no experts, so no expert works on it."""
        group, (tokens, topk_ids, topk_weights) = experts.group, routed
        (count, k), replicas = topk_ids.shape, experts.choosing
        if replicas is None:
            topk_ids = experts.to_physical(topk_ids)
        packed = pack_tokens(tokens, topk_ids, topk_weights, rows=step.max_tokens, replicas=replicas)
        wait = group.all_gather_async(packed)

        def gathered() -> Received:
            tokens, topk_ids, topk_weights = unpacked(wait(), routed.tokens, k)
            topk_ids, first = experts.received(topk_ids)
            return Received(tokens, topk_ids, topk_weights, experts.fraction, first=first)

        return AllGatherDispatch(experts, gathered, group.reduce_scatter_async, count, step.max_pairs)

    def memory(self, sizes: PrefillSizes) -> Memory:
        """All tokens gathered, the results replace the tokens, unless these are shorter. A further pair brings no rows
        but those between the products."""
        held = sizes.words * sizes.tokens * sizes.ranks * sizes.back
        return Memory(held, max(sizes.chunk or 0, sizes.k), cdiv(sizes.pairs, sizes.chunk or sizes.pairs), rows=2)


def make(mesh: Ranks) -> Dispatcher:
    return AllGather()


class AllGatherDispatch(Dispatch):
    """Tokens that are being gathered, in rounds.

    Several rounds take no memory for the sums of all tokens if these are as long as the tokens: they replace the rows
    of received tokens, whose experts are done. Sums lie closer than packed rows, so they end before the rows of the
    next round begin.

    Args:
        gathered: waits for the tokens of all ranks, which are the beginnings of packed rows that nothing else reads.
        add: starts to add the sums of all ranks; it returns a function that waits for those of this rank's ``count``
            tokens, padded.
    """

    def __init__(
        self,
        experts: ExpertParallel,
        gathered: Callable[[], Received],
        add: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
        count: int,
        max_pairs: int,
    ):
        self._experts, self._max_pairs = experts, max_pairs
        self._add, self._count = add, count
        self._gathered = gathered
        self._received: Received | None = None
        self._parts: list[Part] = []
        self._room: torch.Tensor | None = None  # the received tokens, until the first sums of several rounds come
        self._sums: torch.Tensor | None = None

    @property
    def rounds(self) -> int:
        if not self._parts:
            self._received = received = self._gathered()
            del self._gathered  # what it holds is freed
            self._parts = self._cut(received)
            self._room = received.tokens if len(self._parts) > 1 else None
        return len(self._parts)

    def _cut(self, received: Received) -> list[Part]:
        """The rounds of tokens that have come at once; the host waits for counts, unless they all fit or are known."""
        (rows, k), pairs, max_pairs = received.topk_ids.shape, received.local_pairs, self._max_pairs
        held = len(self._experts.held)
        if (rows * min(k, held) if pairs is None else pairs) <= max_pairs:
            return [Part(0, rows, pairs)]
        together = tokens_counted_together(max_pairs, min(k, held))
        return parts_of(self._experts.local_pairs(received.local(held), together), together, rows, max_pairs)

    def receive(self, number: int) -> Received:
        is_last = number == self.rounds - 1
        (first, last, local_pairs), received = self._parts[number], self._received
        assert received is not None
        if is_last:
            self._received = None  # its memory is free as soon as the experts are done with it
        tokens, topk_ids, topk_weights = (tensor[first:last] for tensor in received[:3])
        return received._replace(tokens=tokens, topk_ids=topk_ids, topk_weights=topk_weights, local_pairs=local_pairs)

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        if self._room is not None:
            self._sums, self._room = _sums_in(self._room, sums), None
        if self._sums is not None:
            self._sums[self._parts[number].first : self._parts[number].last] = sums
            sums = self._sums
        if number == self.rounds - 1:
            self._sums = None
            self._returning = self._add(sums)

    def combine(self) -> torch.Tensor:
        return self._returning()[: self._count]


def _sums_in(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Memory for the sums of all tokens, ``like`` some of them: that of the tokens if a sum is as long as a token."""
    count, hidden = len(tokens), like.shape[1]
    if tokens.dtype == like.dtype and tokens.shape[1] == hidden:
        return tokens.as_strided((count, hidden), (hidden, 1))
    return like.new_empty(count, hidden)
