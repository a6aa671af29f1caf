"""Experts that move between steps, on ranks that are threads: in every format of weights, after every turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.config.quantization import WeightScheme
from dsa_engine.engine.steps.rebalancing import Rebalancing
from dsa_engine.parallel.experts.balance import imbalance
from dsa_engine.parallel.experts.counts import ExpertCounter, ExpertCounts, count_topk_ids
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.parallel.experts.layer_placements import LayerPlacements
from dsa_engine.parallel.experts.movement import expert_bytes
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, Held
from dsa_engine.parallel.group import Group
from dsa_engine.weights.formats.base import GroupedExperts
from dsa_engine.weights.formats.block_fp8 import BlockFP8Experts
from dsa_engine.weights.formats.int4 import Int4
from dsa_engine.weights.formats.int8 import Int8Experts
from dsa_engine.weights.formats.unquantized import UnquantizedExperts
from gloo_ranks import exchange_unregistered, on_ranks

CPU = torch.device("cpu")
EXPERTS, RANKS, HIDDEN, INTERMEDIATE = 7, 3, 128, 64
LAYERS = (1, 2, 4, 5)  # more than ranks


def int4(actorder: str) -> Int4:
    scheme = WeightScheme("int", 4, "group", group_size=32, layout="pack-quantized", actorder=actorder)
    return Int4(scheme, torch.float32, CPU)


FORMATS: dict[str, Callable[[Sequence[str]], GroupedExperts]] = {
    "bfloat16": lambda names: UnquantizedExperts(names, HIDDEN, INTERMEDIATE, torch.bfloat16, CPU),
    "fp8": lambda names: BlockFP8Experts(names, HIDDEN, INTERMEDIATE, False, torch.bfloat16, CPU),
    "int8": lambda names: Int8Experts(names, HIDDEN, INTERMEDIATE, torch.bfloat16, CPU),
    "int4": lambda names: int4("").experts(names, HIDDEN, INTERMEDIATE),
    "int4, all orders alike": lambda names: int4("group").experts(names, HIDDEN, INTERMEDIATE),
    "int4, orders of one expert differ": lambda names: int4("group").experts(names, HIDDEN, INTERMEDIATE),
}


def loaded(stored: str, experts: Sequence[int]) -> GroupedExperts:
    """Experts with weights that follow from their numbers."""
    made = FORMATS[stored]([str(expert) for expert in experts])
    for slot, expert in enumerate(experts):
        for number, tensor in enumerate(made.tensors):
            of_expert = torch.Generator().manual_seed(100 * expert + number)
            shape = tensor[slot].shape
            if tensor.dtype == torch.int32 and "orders" in stored and number in (2, 5):
                groups = torch.arange(shape[-1]) // 32
                rows = [groups[torch.randperm(len(groups), generator=of_expert)] for _ in range(shape[:-1].numel())]
                if number == 2 and (expert != 3 or "alike" in stored):
                    rows[1] = rows[0]
                tensor[slot] = torch.stack(rows).view(shape)
            elif tensor.dtype.is_floating_point:
                tensor[slot] = (0.1 * torch.randn(shape, generator=of_expert)).abs().to(tensor.dtype)
            else:
                limits = torch.iinfo(tensor.dtype)
                tensor[slot] = torch.randint(limits.min, limits.max, shape, generator=of_expert, dtype=torch.int64)
    made.loaded()
    return made


def products(experts: GroupedExperts, choices: Sequence[int]) -> torch.Tensor:
    """Each choice's output for the same token."""
    tokens = torch.linspace(-1, 1, HIDDEN).expand(len(choices), HIDDEN).to(torch.bfloat16).contiguous()
    chosen = torch.tensor(choices, dtype=torch.int32)[:, None]
    return experts(Received(tokens, chosen, torch.ones(len(choices), 1), 1.0), sys.maxsize)


def skewed(layer: int, turn: int) -> tuple[float, ...]:
    return tuple(1.0 / (1 + (expert * (layer + 2) + turn) % EXPERTS) for expert in range(EXPERTS))


class Layers:
    """The MoE layers of a rank's model, without anything else."""

    def __init__(self, group: Group, stored: str, replicas: int):
        self.placements = LayerPlacements(RANKS, redundant=replicas)
        self.group, held = group, self.placements.held(EXPERTS, 0, groups=1)
        self.moe = {
            layer: SimpleNamespace(
                expert_parallel=ExpertParallel(group, ExpertPlacement(held, CPU, changes=True)),
                experts=loaded(stored, held[group.index]),
            )
            for layer in LAYERS
        }

    @property
    def model(self) -> Any:
        is_leader, experts = self.group.index == 0, SimpleNamespace(placements=self.placements)
        mesh = SimpleNamespace(ep=self.group, device=CPU, is_leader=is_leader, experts=experts)
        layers = [SimpleNamespace(moe=self.moe.get(number)) for number in range(5)]
        modules = [SimpleNamespace(layer=SimpleNamespace(moe=self.moe[5]))]
        return SimpleNamespace(
            runtime=SimpleNamespace(mesh=mesh), config=SimpleNamespace(n_group=1), layers=layers, mtp=modules
        )


@pytest.fixture(autouse=True)
def threads_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_exchange_pairs", exchange_unregistered)


@pytest.mark.parametrize(("stored", "replicas"), [("bfloat16", 0), *((stored, 1) for stored in FORMATS)])
def test_after_every_turn_each_slot_has_the_expert_of_the_table(stored: str, replicas: int) -> None:
    """Experts have the same bits in every slot that they come to, and every expert has one at any time."""
    whole = loaded(stored, range(EXPERTS))
    wanted = products(whole, range(EXPERTS))
    assert wanted.isfinite().all() and len(wanted.unique(dim=0)) == EXPERTS

    def work(group: Group) -> tuple[list[dict[int, Held]], Rebalancing]:
        layers, calls = Layers(group, stored, replicas), 0

        def loads() -> ExpertCounts:
            nonlocal calls
            calls += 1
            return ExpertCounts("", LAYERS, tuple(skewed(layer, calls) for layer in LAYERS))

        rebalancing = Rebalancing(layers.model, 3, loads, turn_bytes=1)
        addresses = [tensor.data_ptr() for moe in layers.moe.values() for tensor in moe.experts.moved]
        tables = [moe.expert_parallel.placement._replicas.data_ptr() for moe in layers.moe.values()]
        seen: list[dict[int, Held]] = [{}]
        while rebalancing.times < 2:
            rebalancing.turn()
            seen.append({layer: moe.expert_parallel.placement.held for layer, moe in layers.moe.items()})
            for layer, moe in layers.moe.items():
                held = moe.expert_parallel.held
                if seen[-2].get(layer) != seen[-1][layer]:
                    assert torch.equal(products(moe.experts, range(len(held))), wanted[list(held)])
        assert addresses == [tensor.data_ptr() for moe in layers.moe.values() for tensor in moe.experts.moved]
        assert tables == [moe.expert_parallel.placement._replicas.data_ptr() for moe in layers.moe.values()]
        assert len(rebalancing.staging) == max(expert_bytes(moe.experts.moved) for moe in layers.moe.values())
        return seen[1:], rebalancing

    (seen, first), *others = on_ranks(RANKS, work)
    assert all(other == seen for other, _ in others), "the same placements after the same turns"
    for before, after in zip(seen, seen[1:], strict=False):
        changed = [layer for layer in LAYERS if before[layer] != after[layer]]
        assert len(changed) <= 1, "a turn of so few bytes is a round of one layer"
        for old, new in ((before[layer], after[layer]) for layer in changed):
            differ = [sum(a != b for a, b in zip(*both, strict=True)) for both in zip(old, new, strict=True)]
            assert max(differ) == 1, "a rank receives one expert"
    assert seen[0] == seen[1] != seen[-1] and first.moved_bytes > 0
    assert all({*chain(*held)} == set(range(EXPERTS)) for turn in seen for held in turn.values())


def test_the_busiest_rank_has_what_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    """Routing by the loads that were counted: the largest load of a rank falls to that of the plan, counted exactly."""
    counts = {layer: [40 // (1 + (3 * expert + layer) % EXPERTS) for expert in range(EXPERTS)] for layer in LAYERS}

    def work(group: Group) -> tuple[Rebalancing, list[float], list[float]]:
        layers = Layers(group, "bfloat16", replicas=0)

        def measured() -> list[float]:
            worst = []
            for layer, moe in layers.moe.items():
                choices = torch.tensor([e for e, count in enumerate(counts[layer]) for _ in range(count)])
                physical = moe.expert_parallel.to_physical(choices.int()[:, None])[:, 0]
                served = moe.expert_parallel.placement.rank_of[physical].bincount(minlength=RANKS)
                worst.append(int(served.max()) * RANKS / len(choices))
            return worst

        before = measured()
        rebalancing = Rebalancing(layers.model, 1, lambda: ExpertCounts("", LAYERS, tuple(map(tuple, counts.values()))))
        while not rebalancing.times:
            rebalancing.turn()
        planned = [
            imbalance(counts[layer], layers.placements.better(held, counts[layer], 1))
            for layer in LAYERS
            for held in [layers.placements.held(EXPERTS, 0, 1)]
        ]
        after = measured()
        assert after == pytest.approx(planned)
        return rebalancing, before, after

    caplog.set_level("INFO")
    for rebalancing, before, after in on_ranks(RANKS, work):
        print(before, "→", after)
        assert (rebalancing.before, rebalancing.after) == pytest.approx((sum(before) / 4, sum(after) / 4))
        assert rebalancing.after < rebalancing.before - 0.1
    (line,) = (record.message for record in caplog.records)
    assert "4 layers rebalanced in" in line and f"mean {rebalancing.before:.2f} → {rebalancing.after:.2f}; " in line


def test_loads_are_those_of_all_ranks_since_the_last_time() -> None:
    def work(group: Group) -> list[ExpertCounts]:
        counter = ExpertCounter("m", LAYERS, EXPERTS, group, CPU)
        count_topk_ids(torch.tensor([[0, group.index], [-1, 6]], dtype=torch.int32), counter.counts(4))
        first = counter.take()
        count_topk_ids(torch.tensor([[5]], dtype=torch.int32), counter.counts(1))
        return [first, counter.take()]

    none = (0.0,) * EXPERTS
    for first, second in on_ranks(RANKS, work):
        assert first == ExpertCounts("m", LAYERS, (none, none, (4, 1, 1, 0, 0, 0, 3), none))
        assert second == ExpertCounts("m", LAYERS, ((0, 0, 0, 0, 0, 3, 0), none, none, none))


def test_loads_that_are_even_enough_move_nothing() -> None:
    def work(group: Group) -> int:
        layers = Layers(group, "bfloat16", replicas=2)
        loads = tuple(1.0 + 0.001 * expert for expert in range(EXPERTS))
        rebalancing = Rebalancing(layers.model, 1, lambda: ExpertCounts("", (1, 2), (loads, (0.0,) * EXPERTS)))
        while not rebalancing.times:
            rebalancing.turn()
        return rebalancing.moved_bytes

    assert on_ranks(RANKS, work) == [0] * RANKS
