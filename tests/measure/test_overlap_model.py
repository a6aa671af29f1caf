"""A program of a rank, played again with collectives that take modelled times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dsa_engine.measure.emulation.overlap_model import Communication, replay
from dsa_engine.measure.stage_timer import DeviceClock
from dsa_engine.parallel.collective_log import Collective, CollectiveLog, Event
from dsa_engine.parallel.links import Links, Transfer
from dsa_engine.parallel.side_stream import SideStream

CPU = torch.device("cpu")


class Figures(Links):
    """Links on which a collective takes as many seconds as it sends bytes."""

    def transfer(self, collective: Collective, machines: Sequence[int]) -> Transfer:
        return Transfer(inside=(0.0, float(collective.bytes_sent)))


def played(*program: tuple[str, float, float]) -> Communication:
    """A program on a clock moved by hand: ("work", seconds, 0), ("sync"|"async", bytes, seconds of filling), "wait"."""
    now, log = [100.0], CollectiveLog()
    log.mark = lambda: now[0]
    issued: list[int] = []
    for what, amount, filling in program:
        if what == "work":
            now[0] += amount
            continue
        if what == "wait":
            event = log.wait(issued.pop(0))
        else:
            made = Collective("all_gather", (0, 1), 0, (0, int(amount)), (0, int(amount)), what == "async", what)
            event = log.begin(made)
            if what == "async":
                issued.append(event.number)
        now[0] += filling
        event.after = now[0]
    return replay(log, 100.0, DeviceClock(CPU), Figures(), (0, 0))


@pytest.mark.parametrize(
    ("program", "total", "stalled"),
    [
        ([("work", 5, 0), ("sync", 3, 0), ("work", 5, 0)], 3, 3),
        ([("async", 3, 0), ("work", 5, 0), ("wait", 0, 0)], 3, 0),
        (
            [("async", 7, 0), ("work", 5, 0), ("wait", 0, 0), ("work", 9, 0)],
            7,
            2,
        ),  # work after the wait overlaps nothing
        ([("async", 7, 50), ("work", 5, 0), ("wait", 0, 50)], 7, 2),  # nor does work in place of other ranks
        (
            [("async", 4, 0), ("sync", 2, 0), ("work", 5, 0), ("wait", 0, 0)],
            6,
            6,
        ),  # the same links: one after the other
        (
            [("async", 4, 0), ("async", 4, 0), ("work", 5, 0), ("wait", 0, 0), ("wait", 0, 0)],
            8,
            3,
        ),  # work overlaps once
        ([("async", 4, 0), ("work", 1, 0), ("sync", 2, 0), ("work", 1, 0), ("wait", 0, 0)], 6, 5),
        ([], 0, 0),
    ],
)
def test_what_overlaps_with_what(program: list[tuple[str, float, float]], total: float, stalled: float) -> None:
    result = played(*program)
    assert (result.seconds, result.stalled_seconds) == (total, stalled)


@pytest.mark.parametrize(("beside", "stalled"), [(0, 7), (2, 5), (9, 0)])
def test_transfers_of_a_side_stream_follow_each_other_beside_the_main_one(beside: int, stalled: int) -> None:
    """On a CPU the second one runs where it is waited for; it is played as if it followed the first at once."""
    now, log = [100.0], CollectiveLog(stage=lambda: "side")
    log.mark = lambda: now[0]

    def transfer(ranks: tuple[int, int], seconds: int) -> Event:
        event = log.begin(Collective("all_to_all", ranks, 0, (0, seconds), (0, seconds), True, "side"))
        event.after = now[0]
        return event

    def start() -> Event:
        return transfer((0, 1), 3)

    def follow(first: Event) -> None:
        for event in (first, transfer((0, 2), 4)):
            log.wait(event.number).after = now[0]

    join = SideStream(CPU).relay(start, follow, log=log)
    now[0] += beside
    join()
    result = replay(log, 100.0, DeviceClock(CPU), Figures(), (0, 0, 0))
    assert (result.seconds, result.stalls.get("side", 0)) == (7, stalled)


def test_communication_adds_up_by_stage() -> None:
    one = played(("sync", 3, 0), ("async", 4, 0), ("work", 1, 0), ("wait", 0, 0))
    assert one.total == {"sync": 3, "async": 4} and one.stalls == {"sync": 3, "async": 3}
    both = Communication.sum([one, one]).scaled(0.5)
    assert both == one
