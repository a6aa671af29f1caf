"""Both sides of a run that has P/D disaggregation, simulated: messages and pages arrive at random moments, callers
abort at any time, caches are too small for all requests."""

from __future__ import annotations

import atexit
import threading
from types import SimpleNamespace

import pytest

from dsa_engine.engine.disaggregation import decode_loop
from dsa_engine.engine.disaggregation.messages import Preempted
from two_sides import Simulation


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop has a thread, and none waits."""
    idle = SimpleNamespace(start=lambda: None, join=lambda *_: None, is_alive=lambda: False)
    monkeypatch.setattr(threading, "Thread", lambda **_: idle)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    monkeypatch.setattr(decode_loop, "_POLL_S", 0.0)


@pytest.mark.parametrize("pages", [(60, 60), (16, 60), (60, 16), (14, 13)])
def test_random_orders(pages: tuple[int, int]) -> None:
    """Every request ends as its tokens say, in rows that hold what they should, and gives all pages back."""
    back = 0
    for seed in range(12):
        run = Simulation(seed, *pages)
        rng = run.rng
        prefix = [rng.randrange(50, 99) for _ in range(9)]
        for _ in range(14):
            own = [rng.randrange(50, 99) for _ in range(rng.choice([1, 3, 4, 8, 20, 33]))]
            prompt = prefix + own if rng.random() < 0.4 and len(own) < 20 else own
            run.call(prompt, rng.choice([1, 2, 3, 8, 16]))
            for _ in range(rng.randrange(6)):
                run.step()
        run.run()
        run.check_end()
        back += sum(isinstance(message, Preempted) for message in run.said)
    assert (back > 0) == (pages[1] < 20)


def test_an_abort_between_the_pages_of_a_prompt() -> None:
    """Some pages have come and none is on its way: the prefill side learns that it may free them."""
    run = Simulation(0, 60, 60)
    caller = run.call([60] * 33, 3)
    for _ in range(4):  # four of its nine chunks, with room from the second one on
        run.prefill.turn()
        run.deliver(run.prefill, run.decode)
        run.decode.turn()
        while run.link.sends and run.link.receives:
            run.link.move()
        for _ in range(2):  # its owner tells that pages have come, and all know it a turn later
            run.decode.turn()
        if run.decode.outgoing:
            run.deliver(run.decode, run.prefill)
    (arrival,) = run.decode.loop._arrivals.values()
    assert arrival.posted and not arrival.pending and not arrival.complete
    run.abort(caller)
    run.run()
    run.check_end()


def test_pages_of_an_aborted_request_stay_until_they_have_come() -> None:
    """The decode side may use them before it has the abort, and other requests may find them there."""
    run = Simulation(0, 4, 60)
    run.call([50], 1)  # its number is 0, and it ends with its first token
    run.run()
    caller = run.call([60] * 9, 3)
    for _ in range(4):  # three chunks, with room from the second one on; no page moves
        for source, target in ((run.prefill, run.decode), (run.decode, run.prefill)):
            source.turn()
            while source.outgoing:
                run.deliver(source, target)
    assert run.link.sends and run.link.receives and run.decode.loop._arrivals[1].handover
    run.abort(caller)
    run.call([70] * 9, 2)
    for _ in range(3):
        run.prefill.turn()
    assert len(run.prefill.engine.scheduler.waiting) == 1, "for the pages that are being sent"
    while run.link.sends:
        run.link.move()
    for _ in range(2):
        run.decode.turn()
    run.run()
    run.check_end()
