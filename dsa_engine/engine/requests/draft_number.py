"""The number of drafts of a step, by what they bring.

A step with c drafts of each request brings E(c) = 1 + a_1 + … + a_c tokens of a request, a_j being the fraction of its
steps that accept the first j drafts, and takes T(c), which grows with the number of requests. The number with most
tokens a second, E(c) / T(c), is taken. Acceptance is known on every rank from the tokens that are read
(``Decoding``); times are those of rank 0's clock, gathered when a trial ends, so that all ranks choose alike.

Now and then another number is tried for some steps, as only this shows what it brings now: as often as trials cost
about one step of 400. Without a price numbers are tried 1, 2, 4, 8 choices after the first one for so many requests,
and after they were the best, so that an error does not last. A step without drafts is the step of an engine without
modules: their cache rows stay what they were, and later drafts see them, which changes what is accepted and no token.
A change of the number takes effect when no step is in flight.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TRIAL = 4  # steps
BETWEEN = 16  # steps between two choices, without those of a trial
WATCHED = 3  # the last of these, whose times count
FRACTION = 1 / 400  # of all steps, that trials may cost
_QUIET = BETWEEN - WATCHED
_GAIN = 1.01  # for less the number stays
_LEAST_COST, _UNKNOWN_COST = 0.5, 2.0 * TRIAL  # of a trial, in steps
_DOUBTED = 8  # choices between two trials


def choices_up_to(limit: int) -> tuple[int, ...]:
    """The numbers to choose from, so that rows are powers of two, and ``limit``: few graphs serve all steps."""
    return tuple(sorted({0, limit} | {number for number in (1, 3) if number < limit}))


def best_of(choices: Sequence[int], accepted: Floats, times: Floats, now: int) -> int:
    """The number with most tokens a second; ``now`` if none brings clearly more.

    Args:
        accepted: fraction of steps that accept the first, the first two, … drafts.
        times: of a step with each of ``choices``; nan if not measured.
    """
    values = tokens_of(choices, accepted) / times
    values[choices.index(now)] *= _GAIN
    return now if np.isnan(values).all() else choices[int(np.nanargmax(values))]


def tokens_of(choices: Sequence[int], accepted: Floats) -> Floats:
    """Tokens that a step with each of ``choices`` brings a request."""
    return 1 + np.concatenate(([0.0], accepted.cumsum()))[list(choices)]


@dataclass
class _Size:
    """What is known of steps with about so many requests."""

    times: Floats  # with each number; nan if not measured
    best: int
    turn: int  # choices so far
    doubted: dict[int, int]  # since which of them each number may be tried without a price, for a time
    tried: dict[int, int]  # that of the last trial of each


class DraftNumber:
    """``number`` is that of the next step; ``due``: whether :meth:`exchange` is to be called when no step is in flight;
    ``watches``: whether :meth:`read` is to be called. With one choice it never changes."""

    def __init__(self, choices: Sequence[int]):
        self.choices = tuple(choices)
        self.adapts = len(self.choices) > 1
        self.number = self.choices[-1]
        self.due = self.watches = self._tries = False
        self.clock = time.perf_counter
        self.accepted = 0.5 ** np.arange(1.0, self.choices[-1] + 1)  # of about 64 steps of a request, see ``best_of``
        self._left = _QUIET if self.adapts else 0  # steps until something changes; never if it is 0
        self._sizes: dict[int, _Size] = {}  # the same on all ranks
        self._size = 0  # that of the last choice
        # The last times on this rank, by size and number.
        self._own: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=WATCHED))
        self._read_at, self._read_number = 0.0, -1

    def learn(self, offered: Ints, accepted: Ints) -> None:
        """Counts the drafts that a step has accepted of those of each request."""
        number = np.arange(len(self.accepted))
        known, right = number < offered[:, None], number < accepted[:, None]
        count = known.sum(axis=0)
        self.accepted += (1 - (63 / 64) ** count) * (right.sum(axis=0) / count.clip(min=1) - self.accepted)

    def read(self, number: int | None, requests: int) -> None:
        """Measures a step that has been read: ``number`` of its drafts, None if it has prefilled, and of the requests
        of the fullest rank. Steps follow each other, so it took the time since the one before was read."""
        now = self.clock()
        if number is not None and number == self._read_number:  # the first with a number has other work before it
            self._own[size_of(requests), number].append(now - self._read_at)
        self._read_at, self._read_number = now, -1 if number is None else number

    def launched(self) -> bool:
        """Counts a decode step; returns whether :meth:`choose` is to be called. Most steps are counted and no more."""
        self._left -= 1
        if self._left != 0:
            return False
        if self._tries:  # the last steps of the trial are still to be read
            self.number, self.due, self._tries, self._left = self._sizes[self._size].best, True, False, _QUIET
        elif not self.watches:
            self.watches, self._left, self._read_number = True, WATCHED, -1
        else:
            return True
        return False

    def choose(self, requests: int) -> None:
        """Chooses the number of the next steps, for so many requests of the fullest rank: the best one if another was
        the best before, so that it is measured; otherwise perhaps one to be tried."""
        self._size = size_of(requests)
        if (size := self._sizes.get(self._size)) is None:
            never, now = np.full(len(self.choices), math.nan), dict.fromkeys(self.choices, 1)
            size = self._sizes[self._size] = _Size(never, self.number, 0, now, {**now})
        size.turn += 1
        if (best := best_of(self.choices, self.accepted, size.times, size.best)) != size.best:
            size.doubted[size.best] = size.tried[size.best] = size.turn
            size.best = best
        number = self._to_try(size) if best == self.number else None
        self._tries = self.watches = number is not None
        self.number, self._left = (best, _QUIET) if number is None else (number, TRIAL)

    def _to_try(self, size: _Size) -> int | None:
        """Of the numbers that may be tried now the one whose last trial is the longest ago."""
        spared = BETWEEN * FRACTION / (len(self.choices) - 1)  # steps, for each number by each choice
        for number in sorted(set(self.choices) - {size.best}, key=lambda one: size.tried[one]):
            last, ago = size.tried[number], size.turn - size.tried[number]
            if last - size.doubted[number] <= ago <= _DOUBTED or self._cost(number, size) <= spared * ago:
                size.tried[number] = size.turn
                return number
        return None

    def _cost(self, number: int, size: _Size) -> float:
        """What a trial costs, in steps with the best number; one more for the rows that find no drafts."""
        one, best = self.choices.index(number), self.choices.index(size.best)
        if np.isnan(size.times[[one, best]]).any():
            return _UNKNOWN_COST
        tokens = tokens_of(self.choices, self.accepted)
        return max(_LEAST_COST, TRIAL * float(size.times[one] / size.times[best] - tokens[one] / tokens[best]) + 1)

    def exchange(self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Takes rank 0's times of the last steps of this size; every rank calls it. What was not measured again has
        grown as the best number's has. ``gather``: joins tensors of all ranks."""
        own = [min(self._own.get((self._size, number), [math.nan])) for number in self.choices]
        times = gather(torch.tensor(own, dtype=torch.float64, device=device))[: len(own)].cpu().numpy()
        size = self._sizes[self._size]
        best = self.choices.index(size.best)
        ratio = times[best] / size.times[best]
        size.times = np.where(np.isnan(times), size.times * (1.0 if np.isnan(ratio) else ratio), times)
        self.due = self.watches = False
        self._own.clear()


def size_of(requests: int) -> int:
    """Steps of one size take about the same time: up to a power of two of requests."""
    return (requests - 1).bit_length()
