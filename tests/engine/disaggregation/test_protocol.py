"""Both sides of a run that has P/D disaggregation, simulated: messages and pages arrive at random moments, callers
abort at any time, caches are too small for all requests."""

from __future__ import annotations

import atexit
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.cache.link import by_rank
from dsa_engine.engine.disaggregation import decode_loop
from dsa_engine.engine.disaggregation.messages import Preempted
from dsa_engine.engine.requests.request import Request
from dsa_engine.sampling_params import SamplingParams
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


@pytest.mark.parametrize(("cp", "dcp", "receivers"), [(4, 2, 3), (2, 2, 1), (3, 1, 2), (1, 1, 4), (6, 3, 2)])
def test_a_page_goes_from_a_rank_that_has_it_to_the_one_that_holds_it(cp: int, dcp: int, receivers: int) -> None:
    """Each side has its own ``dcp_size``: both ranks of a link name the same pages, in the same order, and each page
    goes once. The first 2 of 11 have come before."""
    source, target = PageLedger(0, cp, 20, dcp_size=dcp), PageLedger(0, receivers, 20, dcp_size=receivers)
    request, numbers = Request(0, [0], SamplingParams()), range(2, 11)
    target.take(Request(1, [0], SamplingParams()), 0, 1)  # so that both begin on another rank
    for ledger, count in ((source, 11), (target, 12)):
        ledger.begin(request, range(len(ledger.pools)), np.empty(0, np.int64), count)
    sources = source.ranks_of(request, numbers, source.pools_of(range(cp)))
    ranks = target.ranks_of(request, range(12), range(1))[numbers.start : numbers.stop]
    assert set(sources.tolist()) == set(range(cp)) and len(sources) == len(ranks) == 9
    indices, moved = np.arange(9), list[int]()
    for receiver in range(receivers):
        for receive in by_rank(0, indices, ranks == receiver, sources):
            sends = {one.rank: one.pages for one in by_rank(0, indices, sources == receive.rank, ranks)}
            assert sends[receiver] == receive.pages
            moved += receive.pages
    assert sorted(moved) == [*range(9)]
