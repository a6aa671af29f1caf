"""Planned expert choices: distinct for a token, as often as the plan says, the same on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.measure.emulation.routing import Routing, balanced_choices, check_loads, weighted_choices
from dsa_engine.parallel.expert import dispatch_all_gather, dispatch_all_to_all

CPU = torch.device("cpu")


def counts(chosen: torch.Tensor, experts: int) -> list[int]:
    return chosen.flatten().long().bincount(minlength=experts).tolist()


def assert_distinct(chosen: torch.Tensor) -> None:
    ordered = chosen.sort(dim=1).values
    assert not bool((ordered[:, 1:] == ordered[:, :-1]).any())


# (experts, chosen, groups, groups chosen from): V3.2, GLM-5, the demo, sizes that divide nothing.
SIZES = [(256, 8, 8, 4), (256, 8, 1, 1), (24, 4, 4, 2), (12, 3, 3, 2), (10, 3, 1, 1), (7, 7, 1, 1), (9, 2, 3, 2)]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SIZES), st.integers(0, 700))
def test_balanced(sizes: tuple[int, int, int, int], tokens: int) -> None:
    experts, top_k, groups, top_groups = sizes
    chosen = balanced_choices(tokens, top_k, experts, groups, top_groups, CPU)
    assert chosen.shape == (tokens, top_k) and chosen.dtype == torch.int32
    found = counts(chosen, experts)
    assert len(found) == experts and max(found) - min(found) <= 1
    assert_distinct(chosen)
    if tokens and top_k % top_groups == 0:
        of_groups = [len(set((row // (experts // groups)).tolist())) for row in chosen]
        assert max(of_groups) == top_groups or groups == 1


def test_balanced_choices_spread_over_ranks() -> None:
    """V3.2 on 64 ranks of 4 experts: a token goes to 8 ranks in 4 of the 8 groups."""
    chosen = balanced_choices(512, 8, 256, 8, 4, CPU)
    assert {len(set((row // 4).tolist())) for row in chosen} == {8}
    assert {len(set((row // 32).tolist())) for row in chosen} == {4}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 1000), min_size=8, max_size=40), st.integers(1, 4), st.integers(0, 300))
def test_weighted(loads: list[int], top_k: int, tokens: int) -> None:
    loads = [1 + min(load, sum(loads) // 8) for load in loads]  # none above its possible share
    if max(loads) * top_k > sum(loads):
        loads = [1] * len(loads)
    chosen = weighted_choices(tokens, top_k, len(loads), loads, CPU)
    assert chosen.shape == (tokens, top_k)
    assert_distinct(chosen)
    for found, load in zip(counts(chosen, len(loads)), loads, strict=True):
        assert abs(found - load / sum(loads) * tokens * top_k) < 1 + 1e-6


def test_weighted_choices_of_neighbours_differ() -> None:
    """A rank's tokens are neighbours; its choices follow the loads as those of all do."""
    loads = [float(1 + e % 4) for e in range(32)]
    chosen = weighted_choices(4096, 4, 32, loads, CPU)
    part = torch.tensor(counts(chosen[512:1024], 32)) / 512
    assert float((part - torch.tensor(counts(chosen, 32)) / 4096).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        ([1.0] * 7, "there are 7 expert loads, the model has 8 routed experts; give one for each"),
        ([9.0] + [1.0] * 7, "expert 0 has 56.2% of the load; a token chooses 2 different experts, so that one gets at"),
    ],
)
def test_loads_that_no_router_can_give(loads: list[float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_loads(loads, 8, 2)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="load"):
        Routing(4, 0, tuple(loads)).plan(5, 2, 8, CPU)


def test_every_rank_has_the_same_plan() -> None:
    rows = [5, 0, 7, 2]
    plans = [Routing(4, rank, rows=rows).plan(rows[rank], 2, 8, CPU) for rank in range(4)]
    assert all(torch.equal(plan.experts, plans[0].experts) for plan in plans)
    assert torch.equal(torch.cat([plan.own(n) for plan, n in zip(plans, rows, strict=True)]), plans[0].experts)
    assert sum(sum(plan.arriving[1]) for plan in plans) >= 14  # every token goes somewhere
    padded = plans[1].padded(9)
    assert padded.shape == (36, 2) and torch.equal(padded[18:25], plans[2].own(7)) and bool((padded[9:18] == -1).all())


def test_without_word_from_the_others_all_have_as_many_tokens() -> None:
    routing = Routing(3, 1)
    assert routing.plan(6, 2, 9, CPU).rows == (6, 6, 6)
    routing.rows = [4, 4, 4]
    assert routing.plan(3, 2, 9, CPU).rows == (3, 3, 3)
    assert routing.plan(4, 2, 9, CPU) is routing.plan(4, 2, 9, CPU)  # the next layer's


def test_padding_of_a_step_has_no_experts() -> None:
    """A decode step of static shape has more rows than tokens."""
    plan = Routing(3, 1, rows=[4, 2, 1]).plan(8, 2, 9, CPU)
    assert plan.rows == (4, 2, 1) and plan.own(8).shape == (8, 2)
    assert torch.equal(plan.own(8)[:2], plan.experts[4:6]) and bool((plan.own(8)[2:] == -1).all())
    group = EmulatedGroup((0, 1, 2), 1, None, routing=Routing(3, 1, rows=[4, 2, 1]))
    here = dispatch_all_gather(torch.randn(8, 5), torch.zeros(8, 2, dtype=torch.int32), torch.rand(8, 2), 3, 8, group)
    assert int((here.experts >= 0).sum()) == sum(counts(plan.experts, 9)[3:6])


@pytest.mark.parametrize("rows", [[5, 0, 7, 2], [0, 3, 0, 0], [4, 4, 4, 4]])
@pytest.mark.parametrize("loads", [None, (1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0, 2.0)])
def test_dispatches_bring_the_planned_pairs(rows: list[int], loads: Any) -> None:
    """Both dispatches, on every rank: each rank's experts get the pairs that the plan has for them, and no others."""
    plan = Routing(4, 0, loads, rows).plan(rows[0], 2, 8, CPU)
    expected = counts(plan.experts, 8)
    for rank, count in enumerate(rows):
        tokens, weights = torch.randn(count, 6), torch.rand(count, 2)
        wrong = torch.zeros(count, 2, dtype=torch.int32)  # what a router has said
        for name in ("all_to_all", "all_gather"):
            group = EmulatedGroup((0, 1, 2, 3), rank, None, routing=Routing(4, rank, loads, rows))
            if name == "all_to_all":
                here = dispatch_all_to_all(tokens, wrong, weights, 2, group)
            else:
                here = dispatch_all_gather(tokens, wrong, weights, 2, max(rows), group)
                assert len(here.tokens) == 4 * max(rows)
            assert len(here.tokens) == len(here.experts) == len(here.weights)
            found = here.experts[here.experts >= 0]
            assert counts(found, 2) == expected[2 * rank : 2 * rank + 2]
            assert here.combine(torch.randn(len(here.tokens), 6)).shape == (count, 6)
            assert math.isfinite(float(here.weights.sum())) and bool((here.experts < 2).all())
