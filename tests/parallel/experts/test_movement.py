"""Movement of experts between placements: the plan on simulated ranks, and the bytes on real ones."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.parallel.experts.movement import after_round, expert_bytes, move_round, plan_movement, with_fewest_moves
from dsa_engine.parallel.group import Group
from gloo_ranks import exchange_unregistered, on_ranks


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Two placements of the same experts in the same slots; some have replicas, even on one rank."""
    ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    count = ranks * slots
    experts = draw(st.integers(1, count))
    copies = st.lists(st.integers(0, experts - 1), min_size=count - experts, max_size=count - experts)
    both = [draw(st.permutations([*range(experts), *draw(copies)])) for _ in range(2)]
    old, new = ([list(one[first : first + slots]) for first in range(0, count, slots)] for one in both)
    return old, new


@given(placements(), st.integers(1, 3))
def test_ranks_hold_the_new_placement_after_the_rounds(
    both: tuple[list[list[int]], list[list[int]]], staged: int
) -> None:
    old, new = both
    rounds = plan_movement(old, new, staged)
    now = tuple(map(tuple, old))
    for moves in rounds:
        assert max(Counter(move.target for move in moves).values()) <= staged
        now = after_round(now, moves)
        assert set(chain(*now)) == set(chain(*old)), "each expert lies somewhere at any time"
    assert [Counter(slots) for slots in now] == [Counter(slots) for slots in new]
    moved = sum(len(moves) for moves in rounds)
    assert moved == sum((Counter(a) - Counter(b)).total() for a, b in zip(new, old, strict=True))


@given(placements(), st.randoms())
def test_ranks_are_exchanged_for_fewer_moves(both: tuple[list[list[int]], list[list[int]]], random: Random) -> None:
    old, new = both
    for nodes in (1, len(old)):
        exchanged = with_fewest_moves(old, new, nodes)
        assert sorted(map(tuple, new)) == sorted(exchanged)
    assert sorted(map(sorted, with_fewest_moves(old, new, nodes=len(old)))) == sorted(map(sorted, new))
    shuffled = random.sample(old, len(old))
    assert [*map(set, with_fewest_moves(old, shuffled))] == [*map(set, old)], "experts that are where they should be"


def test_nodes_stay_together() -> None:
    old, new = [[0], [1], [2], [3], [4], [5]], [[5], [3], [2], [0], [1], [4]]
    assert with_fewest_moves(old, new, nodes=2) == ((0,), (1,), (4,), (3,), (2,), (5,))
    assert with_fewest_moves(old, new) == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_few_rounds() -> None:
    """64 ranks of 5 experts, nearly all of which move: no fewer rounds than 5 are possible."""
    physical = [*range(256), *range(0, 256, 4)]
    placed = [Random(seed).sample(physical, 320) for seed in (1, 2)]
    old, new = ([one[first : first + 5] for first in range(0, 320, 5)] for one in placed)
    rounds = plan_movement(old, new)
    print([len(moves) for moves in rounds])
    assert sum(map(len, rounds)) > 300 and len(rounds) <= 8


def test_sources_are_spread_over_the_replicas() -> None:
    old = [[0, 1], [0, 2], [3, 1], [3, 2]]
    rounds = plan_movement(old, [[0, 1], [3, 2], [3, 0], [2, 0]], staged=2)
    assert [[move.source for move in moves if old[move.source][move.source_slot] == 0] for moves in rounds] == [[0, 1]]


def test_weights_of_any_dtype_move_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swaps and a replica between three ranks, in FP8 codes with float32 scales."""
    monkeypatch.setattr(Group, "_exchange_pairs", exchange_unregistered)
    old, new = [[0, 1], [2, 3], [4, 0]], [[2, 4], [0, 3], [1, 3]]
    rounds, now = plan_movement(old, new), tuple(map(tuple, old))
    for moves in rounds:
        now = after_round(now, moves)

    def work(group: Group) -> bool:
        def weights(experts: tuple[int, ...] | list[int]) -> list[torch.Tensor]:
            codes = torch.stack([torch.full((3, 5), float(expert + 1)) for expert in experts])
            return [codes.to(torch.float8_e4m3fn), codes[:, 0, 0] / 7]

        tensors = weights(old[group.index])
        addresses = [tensor.data_ptr() for tensor in tensors]
        staging = torch.empty(1, expert_bytes(tensors), dtype=torch.uint8)
        for moves in rounds:
            move_round(group, moves, tensors, staging)
        same = zip(tensors, weights(now[group.index]), strict=True)
        return addresses == [tensor.data_ptr() for tensor in tensors] and all(
            torch.equal(a.float(), b.float()) for a, b in same
        )

    assert on_ranks(3, work) == [True] * 3
