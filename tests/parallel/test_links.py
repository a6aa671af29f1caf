"""The link model against times computed by hand, and invalid files of links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.parallel.collective_log import Collective, Kind
from dsa_engine.parallel.links import Link, Links

# Round figures: 100 and 10 bytes per microsecond.
LINKS = Links(
    machine_size=4,
    start_us=5.0,
    inside=Link("in", bandwidth_gb_s=0.1, latency_us=1.0, message_us=0.5),
    between=Link("out", bandwidth_gb_s=0.01, latency_us=3.0, message_us=2.0),
)


def even(kind: Kind, ranks: range | tuple[int, ...], part: int, index: int = 0) -> Collective:
    """Equal parts to and from all ranks."""
    counts = tuple(0 if i == index else part for i in range(len(ranks)))
    return Collective(kind, tuple(ranks), index, counts, counts)


@pytest.mark.parametrize(
    ("collective", "microseconds"),
    [
        # One machine, a ring of 4: start, 3 hops, 3 steps of 1000 B at 100 B/µs.
        (even("all_gather", range(4), 1000), 5 + 3 * 1 + 3 * 10),
        (even("reduce_scatter", range(4), 1000), 5 + 3 * 1 + 3 * 10),
        (even("all_gather", (2, 3), 1000), 5 + 1 + 10),
        # Two machines of 4: 6 hops inside, 1 between; 4 adapters carry 40 B/µs, less than 100 inside.
        (even("all_gather", range(8), 1000), 5 + 6 * 1 + 1 * 3 + 7 * 25),
        # One rank a machine: hops between only, one adapter.
        (even("all_gather", (0, 4, 8), 1000), 5 + 2 * 3 + 2 * 100),
        # Two ranks in one machine, one in another: one adapter is the slowest link.
        (even("reduce_scatter", (2, 3, 4), 1000), 5 + 1 + 3 + 2 * 100),
        # A reduce-scatter and an all-gather of a quarter each, started once.
        (even("all_reduce", range(4), 1000), 5 + 2 * (3 * 1 + 3 * 2.5)),
        # To 3 neighbours: a hop, 3 messages, 3000 B.
        (even("all_to_all", range(4), 1000), 5 + 1 + 3 * 0.5 + 30),
        # Rank 0 of 8: 3000 B inside in 32.5 µs, and beside that 4000 B over its own adapter.
        (even("all_to_all", range(8), 1000), 5 + 3 + 4 * 2 + 400),
        # Almost nothing between machines: the inside takes longer.
        (Collective("all_to_all", (0, 1, 4), 0, (0, 9000, 10), (0, 10, 10)), 5 + 1 + 0.5 + 90),
        # More comes in than goes out: both directions at once, the longer one counts.
        (Collective("all_to_all", (0, 1, 4), 1, (10, 0, 10), (10, 0, 700)), 5 + 3 + 2 + 70),
        # One message: a hop inside, a hop between; the receiver computes the same time.
        (Collective("send", (0, 1, 4), 0, (0, 1000, 0), (0, 0, 0)), 5 + 1 + 10),
        (Collective("send", (0, 1, 4), 1, (0, 0, 1000), (0, 0, 0)), 5 + 3 + 100),
        (Collective("recv", (0, 1, 4), 2, (0, 0, 0), (0, 1000, 0)), 5 + 3 + 100),
        (even("all_gather", (3,), 1000), 0),
    ],
)
def test_by_hand(collective: Collective, microseconds: float) -> None:
    machines = [rank // LINKS.machine_size for rank in range(12)]
    assert LINKS.seconds(collective, machines) == pytest.approx(microseconds * 1e-6)


def test_defaults() -> None:
    """The gathered rows of a layer, 128K tokens of (576 + 128) bf16 values over 64 ranks, take half a millisecond."""
    links = Links()
    assert (links.inside.name, links.between.name, links.machine_size) == ("NVLink", "InfiniBand", 8)
    gathered = even("all_gather", range(64), 131072 // 64 * 704 * 2)
    hops = 7e-6 + 56 * 1e-6 + 7 * 3e-6
    assert links.seconds(gathered, [rank // 8 for rank in range(64)]) == pytest.approx(hops + 63 * 2048 * 1408 / 360e9)
    assert "NVLink 360 GB/s" in str(links) and "7 µs to start a collective" in str(links)


def test_a_file_replaces_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(json.dumps({"machine_size": 72, "between": {"name": "Ethernet", "bandwidth_gb_s": 25}}))
    links = Links.read(path)
    assert links == Links(machine_size=72, between=Link("Ethernet", 25, Links().between.latency_us, 1.0))
    path.write_text(json.dumps(links.to_json()))
    assert Links.read(path) == links


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "links must be a JSON object with some of the keys machine_size, start_us, inside, between, not [1]"),
        ({"nvlink": {}}, "links has no key 'nvlink'; keys are machine_size, start_us, inside, between"),
        ({"inside": 5}, "inside must be a JSON object with some of the keys name, bandwidth_gb_s, latency_us"),
        ({"inside": {"gbps": 5}}, "inside has no key 'gbps'; keys are name, bandwidth_gb_s, latency_us, message_us"),
        ({"inside": {"bandwidth_gb_s": 0}}, "inside.bandwidth_gb_s must be a number above 0, not 0"),
        ({"between": {"latency_us": -1}}, "between.latency_us must be a number of at least 0, not -1"),
        ({"between": {"message_us": "1"}}, "between.message_us must be a number of at least 0, not '1'"),
        ({"between": {"name": 7}}, "between.name must be a text, not 7"),
        ({"start_us": True}, "start_us must be a number of at least 0, not True"),
        ('{"start_us": NaN}', "start_us must be a number of at least 0, not nan"),
        ({"machine_size": 0}, "machine_size must be a positive integer, not 0"),
        ({"machine_size": 2.5}, "machine_size must be a positive integer, not 2.5"),
    ],
)
def test_what_is_no_description_of_links(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        Links.read(path)
    assert message in str(error.value) and "links.json" in str(error.value)
