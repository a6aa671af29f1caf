"""The number of drafts is the one that brings most tokens a second, and is found again when that changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dsa_engine.engine.requests.draft_number import TRIAL, DraftNumber, best_of, choices_up_to

CHOICES = choices_up_to(3)
GOOD, BAD = np.array([0.8, 0.6, 0.45]), np.array([0.01, 0.0, 0.0])


def device_time(requests: int, drafts: int) -> float:
    """Weights are read once, and rows beyond 32 take time."""
    return 1 + 0.02 * drafts + max(0, requests * (1 + drafts) - 32) / 32


def test_choices() -> None:
    assert [choices_up_to(limit) for limit in (0, 1, 2, 3, 7)] == [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 3, 7)]


def test_many_requests_get_fewer_drafts() -> None:
    def best(requests: int, accepted: np.ndarray) -> int:
        return best_of(CHOICES, accepted, np.array([device_time(requests, c) for c in CHOICES]), 0)

    assert [best(requests, GOOD) for requests in (1, 8, 16, 32, 128)] == [3, 3, 1, 0, 0]
    assert [best(requests, np.array([0.5, 0.2, 0.1])) for requests in (1, 8, 16, 128)] == [3, 3, 1, 0]
    assert {best(requests, np.zeros(3)) for requests in (1, 8, 128)} == {0}


def test_what_is_not_measured_is_not_taken() -> None:
    assert best_of(CHOICES, GOOD, np.array([np.nan] * 3), 1) == 1
    assert best_of(CHOICES, GOOD, np.array([1, np.nan, 1.1]), 1) == 3
    assert best_of(CHOICES, np.array([0.101, 0, 0]), np.array([1, 1.1, 9]), 0) == 0, "for 0.1% it stays"


@dataclass
class Run:
    """Steps as they would run; ``seen``: by what a step of a number is longer for the clock than it should be."""

    number: DraftNumber
    requests: int = 1
    accepted: np.ndarray = field(default_factory=lambda: GOOD)
    now: float = 0.0
    made: int = 0  # drafts of each request
    seen: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number.clock = lambda: self.now

    def steps(self, count: int) -> tuple[Counter[int], float]:
        """How often each number was taken, and tokens a second of a request."""
        taken, tokens, real, number = Counter[int](), 0.0, 0.0, self.number
        for _ in range(count):
            if number.due:
                number.exchange(lambda times: torch.cat((times, times * torch.nan)), torch.device("cpu"))
            this = number.number
            if number.launched():
                number.choose(self.requests)
            checked, self.made = min(this, self.made), this
            number.accepted[:checked] = self.accepted[:checked]
            tokens += 1 + self.accepted[:checked].sum()
            taken[this] += 1
            real += device_time(self.requests, this)
            self.now += device_time(self.requests, this) * self.seen.get(this, 1)
            if number.watches:
                number.read(this, self.requests)
        return taken, tokens / real

    @property
    def best(self) -> float:
        return max((1 + self.accepted[:c].sum()) / device_time(self.requests, c) for c in CHOICES)


def test_it_follows_load_and_acceptance() -> None:
    run = Run(DraftNumber(CHOICES), 4)
    run.steps(100)
    assert run.number.number == 3
    run.requests, run.accepted = 128, BAD
    run.steps(100)
    taken, _ = run.steps(12_000)
    assert taken[0] > 0.98 * 12_000 and taken[1] >= TRIAL, "another number is tried now and then"
    run.requests = 4
    run.steps(200)
    assert run.steps(2000)[0][0] > 0.9 * 2000
    run.accepted = GOOD
    run.steps(1000)
    assert run.steps(1000)[0][3] > 0.95 * 1000, "it recovers"


@pytest.mark.parametrize("requests", [1, 16, 128])
@pytest.mark.parametrize("accepted", [GOOD, BAD])
def test_trials_cost_little(requests: int, accepted: np.ndarray) -> None:
    run = Run(DraftNumber(CHOICES), requests, accepted)
    run.steps(400)
    assert run.steps(5000)[1] > 0.995 * run.best


@pytest.mark.parametrize("requests", [1, 16, 128])
@pytest.mark.parametrize("wrong", [{0: 0.5}, {1: 0.5}, {3: 0.5}, {0: 2}, {1: 2}, {3: 2}])
def test_an_error_does_not_last(requests: int, wrong: dict[int, float]) -> None:
    """All times of the first trial of a number are half or twice what they should be, or those of all first steps."""
    run = Run(DraftNumber(CHOICES), requests, seen=wrong)
    run.steps(24)
    run.seen = {}
    run.steps(400)
    assert run.steps(1000)[1] > 0.97 * run.best


def test_acceptance_is_that_of_the_last_steps() -> None:
    number = DraftNumber(CHOICES)
    offered = np.array([3, 1, 0])
    for _ in range(600):
        number.learn(offered, np.array([2, 1, 0]))
    assert number.accepted.round(2).tolist() == [1, 1, 0]
    number.learn(offered * 0, offered * 0)
    assert number.accepted.round(2).tolist() == [1, 1, 0]
    for _ in range(600):
        number.learn(offered, np.array([0, 1, 0]))
    assert number.accepted.round(2).tolist() == [0.5, 0, 0]
