"""The number of drafts of a step, by what they bring.

A step with c drafts of each request brings E(c) = 1 + a_1 + … + a_c tokens of a request, a_j being the fraction of its
steps that accept the first j drafts, and takes T(c), which grows with the number of requests. The number with most
tokens a second, E(c) / T(c), is taken. Acceptance is known on every rank from the tokens that are read
(``Decoding``); times are those of rank 0's clock, gathered when a trial ends, so that all ranks choose alike.

Now and then another number is tried for some steps, as only this shows what it brings now: as often as trials cost
about one step of 400, and each number once without a price. A step without drafts is the step of an engine without
modules: their cache rows stay what they were, and later drafts see them, which changes what is accepted and no token.
A change of the number takes effect when no step is in flight.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]

TRIAL = 4  # steps
BETWEEN = 16  # steps between two choices
FRACTION = 1 / 400  # of all steps, that trials may cost
_GAIN = 1.01  # for less the number stays
_MAX_SPARE = 64.0  # steps


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
    if np.isnan(values).all():
        return now
    best, current = choices[int(np.nanargmax(values))], values[choices.index(now)]
    return now if not np.isnan(current) and np.nanmax(values) < _GAIN * current else best


def tokens_of(choices: Sequence[int], accepted: Floats) -> Floats:
    """Tokens that a step with each of ``choices`` brings a request."""
    return 1 + np.concatenate(([0.0], accepted.cumsum()))[list(choices)]


class DraftNumber:
    """``number`` is that of the next step; ``due``: whether :meth:`exchange` is to be called when no step is in flight;
    ``watches``: whether :meth:`read` is to be called. With one choice it never changes."""

    def __init__(self, choices: Sequence[int]):
        self.choices = tuple(choices)
        self.number = self._best = self.choices[-1]
        self.due = self.watches = False
        self.clock = time.perf_counter
        self.accepted = 0.5 ** np.arange(1.0, self.choices[-1] + 1)  # of all requests so far, see ``best_of``
        self._size = 0
        self._times: dict[int, Floats] = {}  # by size, of each choice; the same on all ranks
        self._read_at, self._read_number = 0.0, -1
        self._own: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=TRIAL - 1)
        )  # by size and number
        self._tried: dict[tuple[int, int], int] = {}  # the step of the last trial, by size and number
        self._step = self._left = 0
        self._spare = 0.0

    @property
    def adapts(self) -> bool:
        return len(self.choices) > 1

    def read(self, number: int | None, requests: int) -> None:
        """Measures a step that has been read: ``number`` of its drafts, None if it has prefilled, and of the requests
        of the fullest rank. Steps follow each other, so it took the time since the one before was read."""
        now = self.clock()
        if number is not None and number == self._read_number:  # the first with a number has other work before it
            self._own[size_of(requests), number].append(now - self._read_at)
        self._read_at, self._read_number = now, -1 if number is None else number

    def launched(self, requests: Callable[[], int], accepted: Callable[[], Floats]) -> None:
        """Counts a decode step, of so many requests of the fullest rank, and chooses the number of the next one. Of
        sixteen steps three are watched, and all of a trial, so that most cost hardly more than without a choice."""
        self._step += 1
        turn = self._step % BETWEEN
        if self._left:
            self._left -= 1
            if not self._left:
                self.number, self.due = self._best, True
        elif turn == 0:
            self._spare, self._size = min(_MAX_SPARE, self._spare + BETWEEN * FRACTION), size_of(requests())
            self._choose(accepted())
        elif turn == BETWEEN - 3:
            self._read_number = -1
        self.watches = self._left > 0 or turn >= BETWEEN - 3

    def _choose(self, accepted: Floats) -> None:
        times = self._times.get(self._size)
        if times is not None:
            self.number = self._best = best_of(self.choices, accepted, times, self._best)
        others = [number for number in self.choices if number != self._best]
        number = min(others, key=lambda one: self._tried.get((self._size, one), -1))
        cost = self._cost(number, accepted, times)
        if cost <= self._spare:
            self._spare -= max(0.0, cost)
            self._tried[self._size, number] = self._step
            self.number, self._left = number, TRIAL

    def _cost(self, number: int, accepted: Floats, times: Floats | None) -> float:
        """What a trial costs, in steps with the best number: those of its rows that find no drafts count too."""
        one, best = self.choices.index(number), self.choices.index(self._best)
        if times is None or np.isnan(times[[one, best]]).any():
            return 0.0 if (self._size, number) not in self._tried else _MAX_SPARE / 2
        tokens = tokens_of(self.choices, accepted)
        brought = (TRIAL - 1) * tokens[one] + 2 * min(tokens[one], tokens[best])
        return float(TRIAL * times[one] / times[best] + 1 - brought / tokens[best])

    def exchange(self, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Takes rank 0's times of the last steps of this size; every rank calls it. What was not measured again has
        grown as the best number's has. ``gather``: joins tensors of all ranks."""
        own = [min(self._own.get((self._size, number), [math.nan])) for number in self.choices]
        times = gather(torch.tensor(own, dtype=torch.float64, device=device))[: len(own)].cpu().numpy()
        before, best = self._times.get(self._size), self.choices.index(self._best)
        if before is not None:
            ratio = times[best] / before[best]
            times = np.where(np.isnan(times), before * (1.0 if np.isnan(ratio) else ratio), times)
        self._times[self._size], self.due = times, False
        self._own.clear()


def size_of(requests: int) -> int:
    """Steps of one size take about the same time: up to a power of two of requests."""
    return (requests - 1).bit_length()
