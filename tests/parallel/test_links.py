"""The link model against times computed by hand."""

from __future__ import annotations

import pytest

from dsa_engine.parallel.links import Link, Links

# Round figures: 100 and 10 bytes per microsecond.
LINKS = Links(5.0, Link(0.1, latency_us=1.0, message_us=0.5), Link(0.01, latency_us=3.0, message_us=2.0))


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "microseconds"),
    [
        # One node, a ring of 4: start, 3 hops, 3 steps of 1000 B at 100 B/µs.
        ("ring", 4, 1, 5 + 3 * 1 + 3 * 10),
        ("ring", 2, 1, 5 + 1 + 10),
        # Two nodes of 4: 6 hops inside, 1 between; 4 adapters carry 40 B/µs, less than 100 inside.
        ("ring", 8, 2, 5 + 6 * 1 + 1 * 3 + 7 * 25),
        # One rank a node: hops between only, one adapter.
        ("ring", 3, 3, 5 + 2 * 3 + 2 * 100),
        # To 3 neighbours: a hop, 3 messages, 3000 B.
        ("all_to_all", 4, 1, 5 + 1 + 3 * 0.5 + 30),
        # One of 8: 3000 B inside in 37.5 µs, and beside that 4000 B over its own adapter.
        ("all_to_all", 8, 2, 5 + 3 + 4 * 2 + 400),
        ("ring", 1, 1, 0),
        ("all_to_all", 1, 1, 0),
    ],
)
def test_by_hand(kind: str, ranks: int, nodes: int, microseconds: float) -> None:
    assert getattr(LINKS, kind)(ranks, nodes, 1000) == pytest.approx(microseconds * 1e-6)


def test_defaults() -> None:
    """The gathered rows of a layer, 128K tokens of (576 + 128) bf16 values over 64 ranks, take half a millisecond."""
    hops = 7e-6 + 56 * 1e-6 + 7 * 3e-6
    seconds = Links().ring(64, 8, 131072 // 64 * 704 * 2)
    assert seconds == pytest.approx(hops + 63 * 2048 * 1408 / 360e9)
