"""Streams, communicators and links, by hand."""

from __future__ import annotations

import pytest

from dsa_engine.measure.costs.stream_model import Compute, Operation, Reach, Start, Wait, play
from dsa_engine.parallel.links import Transfer


def start(key: str, seconds: float, communicator: str = "all", latency: float = 0.0) -> Start:
    return Start(key, Transfer(between=(latency, seconds)), communicator)


@pytest.mark.parametrize(
    ("main", "waited"),
    [
        ([start("a", 4), Wait("a")], 4),
        ([start("a", 4), Compute(3), Wait("a")], 1),
        ([start("a", 4), Compute(5), Wait("a")], 0),
        ([start("a", 4), start("b", 2), Wait("b"), Wait("a")], 6),  # one communicator: b after a
        ([start("a", 4), start("b", 2, "other"), Wait("b")], 4),  # each has half of the link for 4 seconds
        ([start("a", 4), start("b", 2, "other"), Wait("b"), Wait("a")], 6),  # the link has 6 seconds of work
        ([start("a", 4, latency=3), start("b", 2, "other"), Wait("b")], 2),  # a latency holds no link
        ([start("a", 4), Start("b", Transfer(inside=(0.0, 2.0)), "other"), Wait("b")], 2),  # another link
        ([Start("a", Transfer((1.0, 1.0), (0.0, 5.0)), "all"), Wait("a")], 5),  # both kinds of link at once
        ([start("a", 0), Wait("a"), Compute(1)], 0),
    ],
)
def test_what_a_stream_waits_for(main: list[Operation], waited: float) -> None:
    played = play([main])
    assert sum(played.waits.values()) == pytest.approx(waited)
    assert played.seconds == pytest.approx(waited + played.computed) and played.slowed == 0


def test_a_side_stream_goes_on_by_itself() -> None:
    """From the place where the main stream starts it, until the main stream waits for it."""
    main = [Compute(2), Reach("fork"), Compute(5), Wait("end", "side")]
    side = [Wait("fork"), start("a", 3), Wait("a"), start("b", 4), Wait("b"), Reach("end")]
    assert play([main, side]).waits == {"side": 2.0}
    assert play([[*main, Compute(1)], side]).seconds == 2 + 5 + 2 + 1


def test_streams_that_compute_share_the_device() -> None:
    main, side = [Compute(4), Wait("end")], [Compute(3), Reach("end")]
    played = play([main, side])
    assert (played.computed, played.slowed, played.seconds) == (4, 3, 7)


def test_computation_is_slower_beside_a_transfer() -> None:
    played = play([[start("a", 2), Compute(8), Wait("a")]], occupied=0.5)
    assert (played.computed, played.slowed, played.waits) == (8, 1, {})


def test_a_wait_for_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="waits for Wait.*'never'.*no stream reaches"):
        play([[Compute(1), Wait("never", "why")]])
