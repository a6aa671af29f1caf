"""Movement of experts between placements: the plan on simulated ranks, and the bytes on real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.parallel.experts.movement import expert_bytes, move_round, plan_movement
from dsa_engine.parallel.group import Group
from tests.support.gloo_ranks import on_ranks


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
    held, rounds = plan_movement(old, new, staged)
    now = [list(slots) for slots in old]
    for moves in rounds:
        assert max(Counter(move.target for move in moves).values()) <= staged
        arrived = [(move, now[move.source][move.source_slot]) for move in moves]
        for move, expert in arrived:
            now[move.target][move.target_slot] = expert
    assert tuple(map(tuple, now)) == held
    assert [Counter(slots) for slots in held] == [Counter(slots) for slots in new]
    moved = sum(len(moves) for moves in rounds)
    assert moved == sum((Counter(a) - Counter(b)).total() for a, b in zip(new, old, strict=True))


def test_sources_are_spread_over_the_replicas() -> None:
    old = [[0, 1], [0, 2], [3, 1], [3, 2]]
    _, rounds = plan_movement(old, [[0, 1], [3, 2], [3, 0], [2, 0]], staged=2)
    assert [[move.source for move in moves if old[move.source][move.source_slot] == 0] for moves in rounds] == [[0, 1]]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [([[0, 1], [2]], [[0], [1, 2]], "keeps the number"), ([[0], [1]], [[0], [2]], r"no rank holds the experts \[2\]")],
)
def test_an_impossible_movement_is_refused(old: list[list[int]], new: list[list[int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_movement(old, new)


def exchange_unregistered(
    group: Group, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """The same messages on a group of threads, which torch.distributed does not know."""
    assert group.handle is not None
    works = [group.handle.send([rows], peer, 0) for rows, peer in sends]
    works += [group.handle.recv([rows], peer, 0) for rows, peer in receives]
    for work in works:
        work.wait()


def test_weights_of_any_dtype_move_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swaps and a replica between three ranks, in FP8 codes with float32 scales."""
    monkeypatch.setattr(Group, "_exchange_pairs", exchange_unregistered)
    old, new = [[0, 1], [2, 3], [4, 0]], [[2, 4], [0, 3], [1, 3]]
    plan = plan_movement(old, new)

    def work(group: Group) -> bool:
        def weights(experts: tuple[int, ...] | list[int]) -> list[torch.Tensor]:
            codes = torch.stack([torch.full((3, 5), float(expert + 1)) for expert in experts])
            return [codes.to(torch.float8_e4m3fn), codes[:, 0, 0] / 7]

        tensors = weights(old[group.index])
        addresses = [tensor.data_ptr() for tensor in tensors]
        staging = torch.empty(1, expert_bytes(tensors), dtype=torch.uint8)
        for moves in plan.rounds:
            move_round(group, moves, tensors, staging)
        same = zip(tensors, weights(plan.held[group.index]), strict=True)
        return addresses == [tensor.data_ptr() for tensor in tensors] and all(
            torch.equal(a.float(), b.float()) for a, b in same
        )

    assert on_ranks(3, work) == [True] * 3
