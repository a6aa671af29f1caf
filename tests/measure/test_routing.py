"""Assigned expert choices: distinct per token, as frequent as required, the same on every rank."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_folder
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.expert_parallel import EmulatedExpertParallel
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.measure.emulation.routing import balanced_choices, check_loads, weighted_choices
from dsa_engine.parallel.config import MoeDispatch
from dsa_engine.parallel.experts.loads_file import ExpertLoads
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.sampling_params import SamplingParams

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
    counted = counts(chosen, experts)
    assert len(counted) == experts and max(counted) - min(counted) <= 1
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
    loads = [1 + min(load, sum(loads) // 8) for load in loads]  # none above its maximum
    if max(loads) * top_k > sum(loads):
        loads = [1] * len(loads)
    chosen = weighted_choices(tokens, top_k, len(loads), loads, CPU)
    assert chosen.shape == (tokens, top_k)
    assert_distinct(chosen)
    for counted, load in zip(counts(chosen, len(loads)), loads, strict=True):
        assert abs(counted - load / sum(loads) * tokens * top_k) < 1 + 1e-6


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
        ([9.0] + [1.0] * 7, "expert 0 has 56.2% of the load; a token chooses 2 different experts, so one gets at"),
    ],
)
def test_loads_that_no_router_can_give(loads: list[float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_loads(loads, 8, 2)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="load"):
        assigned(4, 0, 8, loads=loads).own(5, 2, CPU)


def assigned(ranks: int, rank: int, experts: int, tokens: Any = None, loads: Any = None) -> AssignedExperts:
    assigned = AssignedExperts(ExpertPlacement.contiguous(experts, ranks, CPU), rank, loads)
    if tokens is not None:
        assigned.begin_step(tokens)
    return assigned


def test_every_rank_assigns_the_same() -> None:
    tokens = [5, 0, 7, 2]
    ranks = [assigned(4, rank, 8, tokens) for rank in range(4)]
    steps = [one.choices(n, 2, CPU) for one, n in zip(ranks, tokens, strict=True)]
    assert all(torch.equal(step.physical, steps[0].physical) for step in steps)
    assert torch.equal(torch.cat([one.own(n, 2, CPU) for one, n in zip(ranks, tokens, strict=True)]), steps[0].physical)
    assert sum(sum(one.step.arriving[1]) for one in ranks) >= 14  # every token goes somewhere
    gathered = ranks[1].gathered(0, 9, 2, CPU)
    own = steps[2].placement.local(ranks[2].own(7, 2, CPU), 1)
    assert gathered.shape == (36, 2) and torch.equal(gathered[18:25], own) and bool((gathered[9:18] == -1).all())


def test_without_word_from_the_others_all_have_as_many_tokens() -> None:
    one = assigned(3, 1, 9)
    assert one.choices(6, 2, CPU).tokens == (6, 6, 6)
    one.begin_step([4, 4, 4])
    assert one.choices(3, 2, CPU).tokens == (3, 3, 3)
    assert one.own(4, 2, CPU) is one.own(4, 2, CPU)  # the next layer's
    assert one.choices(4, 2, CPU) is one.choices(4, 2, CPU)


def test_padding_of_a_step_has_no_experts() -> None:
    """A decode step of static shape has more rows than tokens."""
    one = assigned(3, 1, 9, [4, 2, 1])
    step, own = one.choices(8, 2, CPU), one.own(8, 2, CPU)
    assert step.tokens == (4, 2, 1) and own.shape == (8, 2)
    assert torch.equal(own[:2], step.physical[4:6]) and bool((own[2:] == -1).all())
    group = EmulatedGroup((0, 1, 2), 1, None)
    parallel = EmulatedExpertParallel(group, step.placement, one)
    wrong = torch.zeros(8, 2, dtype=torch.int32)
    here = parallel.dispatch(torch.randn(8, 5), wrong, torch.rand(8, 2), "all_gather", 8).receive(0)
    assert int((here.experts >= 0).sum()) == sum(counts(step.physical, 9)[3:6])


def test_rows_between_which_there_is_padding() -> None:
    """A padded step in which requests have unequal numbers of rows, as drafts leave them: tokens have experts,
    padding has none, also in the dispatch and in the draft passes after it."""
    requests = [Request(i, list(range(9)), SamplingParams(), pages=[2 * i, 2 * i + 1]) for i in range(4)]
    parts = [(5, 1, range(1)), (4, 3, range(1)), (7, 2, range(1, 2)), (3, 1, range(1, 2))]
    chunks = [Chunk(request, *part) for request, part in zip(requests, parts, strict=True)]
    config = ModelConfig.from_pretrained(demo_folder())
    step = StepPlan.of(chunks, 3, config, "head_tail", max_decode_rows=3).padded(config, ContextBuckets(fewest=8))
    assert step.bucket is not None and (step.bucket.rows, step.bucket.requests) == (6, 2)
    live = [[0, 3, 4, 5], [0, 1, 3], []]
    for rank, rows in enumerate(live):
        mesh = EmulatedConfig(emulate_world=3, emulate_rank=rank).create_mesh("cpu")
        parallel = mesh.experts.of_layer(9, 0)
        mesh.begin_step(step)
        several_modules = [[0, 1, 4, 5, 6, 7], [0, 1, 2, 4, 5], []]  # with one row before each request's own
        for count, wanted in ((6, live), (2, [[0, 1], [0, 1], []]), (8, several_modules)):
            given = torch.zeros(count, 2, dtype=torch.int32)  # a router's choices
            own = mesh.assigned[0].own(count, 2, CPU)
            assert (own >= 0).all(dim=1).nonzero()[:, 0].tolist() == wanted[rank]
            dispatch = parallel.dispatch(torch.randn(count, 5), given, torch.rand(count, 2), "all_gather", count)
            here = dispatch.receive(0)
            served = (here.experts >= 0).any(dim=1).nonzero()[:, 0].tolist()
            assert set(served) <= {first * count + row for first, of in enumerate(wanted) for row in of}
            mine = mesh.assigned[0].choices(count, 2, CPU).placement.local(own, rank)
            assert torch.equal(here.experts[rank * count : (rank + 1) * count], mine)
        assert len(rows) == step.ranks[rank].num_tokens
    mesh.begin_step(StepPlan.of(chunks, 3, config, "head_tail", max_decode_rows=3))
    assert mesh.assigned[0].choices(6, 2, CPU).tokens == (4, 3, 0), "of a step without padding they come first"


@pytest.mark.parametrize("loads", [None, tuple(float(1 + e % 3) for e in range(9))])
def test_tensors_of_a_graph_are_updated_and_not_replaced(loads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of steps padded to 2 and 4 rows: before each step their inputs are those of that step, padding
    included."""
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    one = assigned(3, 1, 9, [2, 2, 2], loads)
    read = {}
    for padded in (2, 4):
        read[padded] = (one.own(padded, 2, CPU), one.gathered(padded, padded, 2, CPU))
    capturing[0] = False
    for tokens in ([1, 2, 0], [4, 3, 1], [0, 0, 3], [2, 2, 2], [5, 6, 7], [2, 1, 2]):
        one.begin_step(tokens)
        fresh = assigned(3, 1, 9, tokens, loads)
        for padded, (own, gathered) in read.items():
            if padded < max(tokens):
                continue  # no graph of this size runs
            assert torch.equal(own, fresh.own(padded, 2, CPU))
            assert torch.equal(gathered, fresh.gathered(padded, padded, 2, CPU))
            assert int((own >= 0).sum()) == 2 * tokens[1]
            assert one.own(padded, 2, CPU) is own and one.gathered(padded, padded, 2, CPU) is gathered
    eager = one.own(100, 2, CPU)
    one.begin_step([1, 1, 1])
    assert one.own(100, 2, CPU) is not eager, "what no graph reads does not stay"


@pytest.mark.parametrize("tokens", [[5, 0, 7, 2], [0, 3, 0, 0], [4, 4, 4, 4]])
@pytest.mark.parametrize("loads", [None, (1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0, 2.0)])
@pytest.mark.parametrize("experts", [8, 10])
def test_dispatches_bring_the_assigned_pairs(tokens: list[int], loads: Any, experts: int) -> None:
    """Both dispatches, on every rank: each rank's experts get the pairs assigned to them, and no others."""
    loads = None if loads is None else (*loads, *[1.0] * (experts - 8))
    step = assigned(4, 0, experts, tokens, loads).choices(tokens[0], 2, CPU)
    expected = counts(step.physical, experts)
    firsts = [0, 2, 4, 6, 8] if experts == 8 else [0, 3, 6, 8, 10]
    methods: tuple[MoeDispatch, ...] = ("all_to_all", "all_gather")
    for rank, count in enumerate(tokens):
        rows, weights = torch.randn(count, 6), torch.rand(count, 2)
        wrong = torch.zeros(count, 2, dtype=torch.int32)  # a router's choices
        for method in methods:
            group = EmulatedGroup((0, 1, 2, 3), rank, None)
            parallel = EmulatedExpertParallel(group, step.placement, assigned(4, rank, experts, tokens, loads))
            for max_pairs in (sys.maxsize, 5):
                dispatch = parallel.dispatch(rows, wrong, weights, method, max(tokens), max_pairs)
                arrived = 0
                chosen = []
                for number in range(dispatch.rounds):
                    here = dispatch.receive(number)
                    arrived += len(here.tokens)
                    assert len(here.tokens) == len(here.experts) == len(here.weights)
                    chosen += here.experts[here.experts >= 0].tolist()
                    assert math.isfinite(float(here.weights.sum()))
                    dispatch.send_back(number, torch.randn(len(here.tokens), 6))
                assert dispatch.combine().shape == (count, 6)
                if method == "all_gather":
                    assert arrived == 4 * max(tokens)
                held = firsts[rank + 1] - firsts[rank]
                assert (
                    counts(torch.tensor(chosen, dtype=torch.int32), held) == expected[firsts[rank] : firsts[rank + 1]]
                )


@pytest.mark.parametrize("shared", [0.0, 0.25])
def test_an_emulated_rank_with_replicas(shared: float, tmp_path: Path) -> None:
    """Skewed loads of each layer, in a file: by choices that are assigned with them, ranks serve about as much."""
    path = tmp_path / "loads.json"
    heavy = tuple(1.0 + (expert == 7) * 6.0 for expert in range(24))
    ExpertLoads("m", (1, 2), (heavy, heavy[::-1])).write(path)
    options = {"redundant_experts": 8, "expert_loads": path, "route_shared_expert": bool(shared)}
    mesh = EmulatedConfig(emulate_world=4, emulate_rank=2, **options).create_mesh("cpu")
    for layer in (1, 2, 3):
        parallel = mesh.experts.of_layer(24, layer, shared=shared)
        k, given = 4 + bool(shared), torch.zeros(400, 4 + bool(shared), dtype=torch.int32)
        parallel.dispatch(torch.randn(400, 5), given, torch.rand(400, k), "all_gather", 400).receive(0)
        assigned = mesh.assigned[-1]
        ranks = parallel.placement.rank_of[assigned.step.physical.flatten().long()].bincount().tolist()
        assert sum(ranks) == 4 * 400 * k and max(ranks) / min(ranks) < 1.15, ranks
        assert sum(parallel.placement.count(rank) for rank in range(4)) == 32 + bool(shared)
        if shared:
            own = [parallel.placement.replicas()[24].count(number) for number in assigned.step.physical[:, 4].tolist()]
            assert set(own) == {1}, "every token chooses the shared expert"
    assert len(mesh.assigned) == 3
