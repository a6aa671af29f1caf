"""The dispatch that "auto" takes, and the modelled exchange that it follows."""

from __future__ import annotations

import logging
import random
from itertools import pairwise
from math import comb

import pytest

from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.experts.traffic import (
    DispatchChoice,
    RouterShape,
    RowBytes,
    exchange,
    quantized_bytes,
)
from dsa_engine.parallel.links import Link, Links

METHODS: tuple[DispatchMethod, ...] = ("by_node", "all_to_all")
V32, ROW = RouterShape(256, top_k=8, groups=8, top_groups=4), RowBytes.of(2 * 7168, 8)


@pytest.mark.parametrize("routing", [V32, RouterShape(256, 8), RouterShape(256, 3, 4, 2)], ids=str)
@pytest.mark.parametrize("parts", [64, 16, 8])
def test_expected_tokens_are_those_of_even_routing(routing: RouterShape, parts: int) -> None:
    rng, drawn, size = random.Random(0), 3000, 256 // routing.groups
    reached = 0
    for _ in range(drawn):
        groups = rng.sample(range(routing.groups), routing.top_groups)
        chosen = rng.sample([group * size + i for group in groups for i in range(size)], routing.top_k)
        reached += any(expert < 256 // parts for expert in chosen)
    part = routing.reached(parts)
    assert abs(reached / drawn - part) < 5 * (part * (1 - part) / drawn) ** 0.5


def test_parts_by_hand() -> None:
    assert RouterShape(4, 1, 2, 1).reached(2) == 0.5
    assert V32.reached(8) == pytest.approx(0.5 * (1 - comb(96, 8) / comb(128, 8))), "a node holds a group"
    assert V32.reached(64) == pytest.approx(0.5 * (1 - comb(124, 8) / comb(128, 8))) and V32.reached(1) == 1


def test_each_change_of_the_exchange_shortens_it() -> None:
    """64 ranks of 8 nodes, 2,048 rows each: FP8 tokens, then FP8 sums, then by node."""
    codes, links = RowBytes.of(quantized_bytes(7168), 8, 2 * 7168), Links()
    both = RowBytes.of(quantized_bytes(7168), 8, 2 * 7168, quantized_bytes(7168))
    wide, narrow, coded = (exchange("all_to_all", 2048, 64, 8, row, V32, links) for row in (ROW, codes, both))
    crossing = 7 * 2048 * V32.reached(8) * (7_456 + 2 * 7168) / 45e9  # there and back, between nodes
    by_node = exchange("by_node", 2048, 64, 8, codes, V32, links)
    assert crossing < by_node < 1.6 * crossing and by_node < narrow < 0.8 * wide and coded < 0.8 * narrow
    assert exchange("by_node", 2048, 8, 1, codes, V32, links) == exchange("all_to_all", 2048, 8, 1, codes, V32, links)
    assert exchange("all_to_all", 2048, 1, 1, codes, V32, links) == 0


@pytest.mark.parametrize("nodes", [[rank // 8 for rank in range(64)], [0, 0, 0, 1, 1], [0, 1, 2], [0, 0, 0]], ids=len)
def test_all_ranks_choose_the_shortest_and_the_same(nodes: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    size = len(nodes)
    ranks = [DispatchChoice(nodes, logs=rank == 0) for rank in (0, size - 1)]
    methods = []
    for tokens in (1, 3, 4, 8192, 8000, 1):
        first, last = (one.method(tokens, 8192 * 8, ROW, V32) for one in ranks)
        assert first == last
        methods.append(first)
        taken = 1 << (tokens - 1).bit_length()
        seconds = ranks[0].seconds(taken, ROW, V32)
        assert ("by_node" in seconds) == (1 < len(set(nodes)) < size)
        if taken * size > 8192 * 8:  # more than a rank may serve at a time
            del seconds["all_gather"]
        assert seconds[first] == min(seconds.values())
    assert methods[0] == methods[-1] and methods[1] == methods[2] and methods[3] == methods[4]
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3 and all(method in line for method, line in zip(dict.fromkeys(methods), lines, strict=False))
    assert methods[0] == ("by_node" if size == 64 else "all_gather"), "few tokens: the fewest steps"
    if size == 64:
        assert methods[3] == "by_node", lines


def test_slow_links_between_nodes_move_the_choice() -> None:
    """The slower the links between nodes, the sooner a step goes by node."""
    nodes = [rank // 8 for rank in range(16)]
    sizes = []
    for bandwidth in (360.0, 45.0, 5.0):
        choice = DispatchChoice(nodes, links=Links(between=Link(bandwidth, 3.0, 1.0)))
        methods = [choice.method(1 << i, 8192 * 8, ROW, V32) for i in range(14)]
        sizes.append(methods.count("by_node"))
    assert all(few <= many for few, many in pairwise(sizes)) and sizes[0] < sizes[-1], sizes
