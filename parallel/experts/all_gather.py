"""The all-gather dispatch: every rank gets every token, and the sums of all ranks add under way back.

Which tokens travel does not depend on the routing, but how many choices a rank serves does. Where that may be more than
fit at a time, they are counted, and the rank's experts take the tokens in rounds: skew costs time and not memory.
Nothing travels between rounds, so each rank has as many as it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.parallel.experts.dispatch import Dispatch, Received

# Of what a round may hold, the smallest part by which it is filled.
_PARTS = 16


class Part(NamedTuple):
    """Tokens of a round, consecutive ones of those that were gathered."""

    first: int
    last: int
    served: int | None  # of their choices, here; None: not counted


def tokens_counted_together(most_pairs: int, choices: int) -> int:
    """Consecutive tokens whose choices are counted in one number.

    Args:
        most_pairs: token-expert pairs of a round, at most.
        choices: of a token that a rank may serve, at most.
    """
    return max(1, most_pairs // (_PARTS * choices))


def parts_of(served: list[int], together: int, tokens: int, most_pairs: int) -> list[Part]:
    """Cuts ``tokens`` tokens into as few rounds as have at most ``most_pairs`` served choices each, or those of one
    number where that is more, and these into about as many each.

    Args:
        served: choices served here of each ``together`` tokens, one after the other; the last may be of fewer.
    """
    rounds = len(_filled(served, most_pairs))
    even = cdiv(sum(served), rounds) + max(served)
    numbers = _filled(served, min(most_pairs, even))
    ends = [0, *accumulate(map(len, numbers))]
    return [
        Part(first * together, min(last * together, tokens), sum(of))
        for of, first, last in zip(numbers, ends[:-1], ends[1:], strict=True)
    ]


def _filled(served: list[int], most: int) -> list[list[int]]:
    """Groups of consecutive numbers that add up to at most ``most``, or are one."""
    groups: list[list[int]] = [[]]
    total = 0
    for n in served:
        if groups[-1] and total + n > most:
            groups.append([])
            total = 0
        groups[-1].append(n)
        total += n
    return groups


class AllGatherDispatch(Dispatch):
    """Tokens that have been gathered, in the rounds of ``parts``; ``back`` makes the sums for this rank's own tokens of
    those for all."""

    def __init__(self, arrived: Received, parts: list[Part], back: Callable[[torch.Tensor], torch.Tensor]):
        self.rounds = len(parts)
        self._arrived: Received | None = arrived
        self._parts, self._back = parts, back
        self._sums: list[torch.Tensor] = []

    def arrive(self, number: int) -> Received:
        (first, last, served), arrived = self._parts[number], self._arrived
        assert arrived is not None
        if number == self.rounds - 1:
            self._arrived = None  # its memory is free as soon as the experts are done with it
        some = slice(first, last)
        return Received(
            arrived.tokens[some], arrived.experts[some], arrived.weights[some], arrived.served_fraction, served
        )

    def give_back(self, number: int, sums: torch.Tensor) -> None:
        self._sums.append(sums)
        if number == self.rounds - 1:
            sums = sums if self.rounds == 1 else torch.cat(self._sums)
            self._sums.clear()
            self._own = self._back(sums)

    def combine(self) -> torch.Tensor:
        return self._own
