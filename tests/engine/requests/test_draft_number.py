"""The number of drafts is the one that brings most tokens a second, and is found again when that changes."""

from __future__ import annotations

from collections import Counter

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


def run(number: DraftNumber, steps: int, requests: int, accepted: np.ndarray, now: list[float]) -> Counter[int]:
    """How often each number was taken."""
    taken = Counter[int]()
    for _ in range(steps):
        if number.due:
            number.exchange(lambda times: torch.cat((times, times * torch.nan)), torch.device("cpu"))
        this = number.number
        number.launched(lambda: requests, lambda: accepted)
        taken[this] += 1
        now[0] += device_time(requests, this)
        if number.watches:
            number.read(this, requests)
    return taken


def test_it_follows_load_and_acceptance() -> None:
    number, now = DraftNumber(CHOICES), [0.0]
    number.clock = lambda: now[0]
    run(number, 100, 4, GOOD, now)
    assert number.number == 3
    run(number, 100, 128, BAD, now)
    few = run(number, 12_000, 128, BAD, now)
    assert few[0] > 0.98 * 12_000 and few[1] >= TRIAL, "another number is tried now and then"
    run(number, 200, 4, BAD, now)
    assert run(number, 2000, 4, BAD, now)[0] > 0.7 * 2000, "trials are cheap here"
    taken = run(number, 2000, 4, GOOD, now)
    assert taken[3] > 0.95 * 2000, "it recovers"


@pytest.mark.parametrize("requests", [1, 16, 128])
@pytest.mark.parametrize("accepted", [GOOD, BAD])
def test_trials_cost_little(requests: int, accepted: np.ndarray) -> None:
    """At least 0.99 of the tokens a second of the best number, once each has been tried."""
    number, now = DraftNumber(CHOICES), [0.0]
    number.clock = lambda: now[0]
    run(number, 200, requests, accepted, now)
    begun, made, tokens = now[0], 0, 0.0
    for _ in range(5000):
        if number.due:
            number.exchange(lambda times: times, torch.device("cpu"))
        this = number.number
        number.launched(lambda: requests, lambda: accepted)
        tokens += 1 + accepted[: min(this, made)].sum()
        made = this
        now[0] += device_time(requests, this)
        if number.watches:
            number.read(this, requests)
    best = max((1 + accepted[:count].sum()) / device_time(requests, count) for count in CHOICES)
    assert tokens / (now[0] - begun) > 0.99 * best
