"""The dispatch that "auto" takes, and the modelled traffic that it follows."""

from __future__ import annotations

import logging
import random
from itertools import pairwise

import pytest

from dsa_engine.parallel.experts.choose_dispatch import DispatchChoice
from dsa_engine.parallel.experts.placement import contiguous
from dsa_engine.parallel.experts.traffic import Routing, RowBytes, collectives, expected, reached_part
from dsa_engine.parallel.links import Link, Links

V32, ROW = Routing(top_k=8, groups=8, top_groups=4), RowBytes.of(2 * 7168, 8)


def chosen(routing: Routing, experts: int, rng: random.Random) -> list[int]:
    size = experts // routing.groups
    groups = rng.sample(range(routing.groups), routing.top_groups)
    return rng.sample([group * size + i for group in groups for i in range(size)], routing.top_k)


@pytest.mark.parametrize("routing", [V32, Routing(8), Routing(3, 4, 2)], ids=str)
@pytest.mark.parametrize(("ranks", "on_machine"), [(64, 8), (16, 8), (5, 2), (24, 3)])
def test_expected_tokens_are_those_of_even_routing(routing: Routing, ranks: int, on_machine: int) -> None:
    machines, held = [rank // on_machine for rank in range(ranks)], contiguous(256, ranks)
    rank_of = [rank for rank, experts in enumerate(held) for _ in experts]
    rng, drawn = random.Random(0), 1500
    by_rank, by_machine = [0] * ranks, [0] * (1 + machines[-1])
    for _ in range(drawn):
        reached = {rank_of[expert] for expert in chosen(routing, 256, rng)}
        for rank in reached:
            by_rank[rank] += 1
        for machine in {machines[rank] for rank in reached}:
            by_machine[machine] += 1
    tokens = expected(held, machines, routing, [1] * ranks)
    for counted, parts in ((by_rank, tokens.ranks[0]), (by_machine, tokens.machines[0])):
        for count, part in zip(counted, parts, strict=True):
            assert abs(count / drawn - part) < 5 * (part * (1 - part) / drawn) ** 0.5 + 1e-9
    print(f"{sum(tokens.ranks[0]):.2f} ranks, {sum(tokens.machines[0]):.2f} machines")


def test_replicas_share_and_the_shared_expert_is_chosen_by_all() -> None:
    assert reached_part([0.5] * 4, Routing(1)) == 0.5
    assert reached_part([1, 1, 0, 0], Routing(1, 2, 1)) == 0.5
    assert reached_part([1, 0, 0, 0], Routing(2)) == 0.5
    assert reached_part([0, 0, 0, 0, 1], Routing(2, 2, 1)) == 1.0


def test_a_token_of_v32_reaches_at_most_four_machines() -> None:
    """64 ranks on 8 machines: each of 8 groups lies on a machine, and a token takes experts of 4."""
    machines = [rank // 8 for rank in range(64)]
    tokens = expected(contiguous(256, 64), machines, V32, [8192] * 64)
    assert 3 < sum(tokens.machines[0]) / 8192 <= 4 < 6 < sum(tokens.ranks[0]) / 8192
    slow = {}
    for method in ("all_to_all", "by_machine"):
        of = collectives(method, tokens, machines, ROW, 0)  # type: ignore[arg-type]
        slow[method] = sum(n for one in of for to, n in zip(one.ranks, one.sent, strict=True) if machines[to])
    print(f"bytes between machines, by machine over direct: {slow['by_machine'] / slow['all_to_all']:.3f}")
    assert slow["by_machine"] < 0.7 * slow["all_to_all"]


@pytest.mark.parametrize(
    "machines", [[rank // 8 for rank in range(64)], [0, 0, 0, 1, 1], [0, 1, 2], [0, 0, 0]], ids=len
)
def test_all_ranks_choose_the_shortest_and_the_same(machines: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held, size = contiguous(256, len(machines)), len(machines)
    ranks = [DispatchChoice(machines, logs=rank == 0) for rank in (0, size - 1)]
    methods = []
    for tokens in (1, 3, 4, 8192, 8000, 1):
        first, last = (one.method(tokens, 8192 * 8, ROW, V32, held) for one in ranks)
        assert first == last
        methods.append(first)
        taken = 1 << (tokens - 1).bit_length()
        seconds = ranks[0].seconds(taken, ROW, V32, held)
        assert ("by_machine" in seconds) == (1 < len(set(machines)) < size)
        if taken * size > 8192 * 8:  # more than a rank may serve at a time
            del seconds["all_gather"]
        assert seconds[first] == min(seconds.values())
    assert methods[0] == methods[-1] and methods[1] == methods[2] and methods[3] == methods[4]
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3 and all(method in line for method, line in zip(dict.fromkeys(methods), lines, strict=False))
    assert methods[0] == "all_gather", "few tokens: the fewest collectives"
    if size == 64:
        assert set(methods[1:5]) == {"by_machine"}, lines
    print(lines)


def test_slow_links_between_machines_move_the_choice() -> None:
    """The slower the links between machines, the sooner a step goes by machine."""
    machines, held = [rank // 8 for rank in range(16)], contiguous(256, 16)
    sizes = []
    for bandwidth in (360.0, 45.0, 5.0):
        links = Links(between=Link("slow", bandwidth, 3.0, 1.0))
        choice = DispatchChoice(machines, links=links)
        methods = [choice.method(1 << i, 8192 * 8, ROW, V32, held) for i in range(14)]
        sizes.append(methods.count("by_machine"))
    assert all(few <= many for few, many in pairwise(sizes)) and sizes[0] < sizes[-1], sizes
