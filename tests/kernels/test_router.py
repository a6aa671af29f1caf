"""The router against the paper's description, step by step in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsa_engine.kernels.router import route


def naive(
    logits: list[float], bias: list[float], top_k: int, groups: int, top_groups: int, normalise: bool, factor: float
) -> dict[int, float]:
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // groups
    ranks = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best_groups = sorted(range(groups), key=lambda g: -ranks[g])[:top_groups]
    allowed = [e for e in range(len(choice)) if e // size in best_groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    total = sum(scores[e] for e in chosen) if normalise else 1.0
    return {e: scores[e] / total * factor for e in chosen}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "experts, top_k, groups, top_groups",
    [(12, 3, 3, 2), (16, 4, 4, 2), (8, 8, 1, 1), (6, 1, 1, 1), (20, 5, 10, 3), (12, 4, 2, 2)],
)
def test_choice_and_weights(experts: int, top_k: int, groups: int, top_groups: int, normalise: bool) -> None:
    g = torch.Generator().manual_seed(experts)
    logits, bias = torch.randn(200, experts, generator=g) * 2, torch.randn(experts, generator=g) * 0.3
    kwargs: dict[str, Any] = {"top_k": top_k, "groups": groups, "top_groups": top_groups}
    kwargs |= {"normalise": normalise, "factor": 2.5}
    chosen, weights = route(logits, bias, **kwargs)
    assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert chosen.shape == weights.shape == (200, top_k)
    for row in range(200):
        expected = naive(logits[row].double().tolist(), bias.double().tolist(), **kwargs)
        ours = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert ours == pytest.approx(expected, rel=1e-5)


def test_the_bias_chooses_but_never_weighs() -> None:
    logits, bias = torch.tensor([[3.0, 2.0, -4.0, -5.0]]), torch.tensor([0.0, 0.0, 10.0, 10.0])
    chosen, weights = route(logits, bias, top_k=2, groups=1, top_groups=1, normalise=False, factor=1.0)
    assert set(chosen[0].tolist()) == {2, 3}
    assert dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True)) == pytest.approx(
        {2: 1 / (1 + math.exp(4)), 3: 1 / (1 + math.exp(5))}
    )


def test_very_negative_choices_still_stay_within_the_best_groups() -> None:
    """Closed groups are worth −inf, not 0: a bias far below zero does not let their experts in."""
    logits, bias = torch.zeros(1, 8), torch.tensor([-9.0, -9.1, -9.2, -9.3, -20.0, -20.0, -20.0, -20.0])
    chosen, _ = route(logits, bias, top_k=3, groups=2, top_groups=1, normalise=True, factor=1.0)
    assert sorted(chosen[0].tolist()) == [0, 1, 2]


def test_scores_that_vanish_are_normalised_without_nan() -> None:
    _, weights = route(
        torch.full((1, 4), -200.0), torch.zeros(4), top_k=2, groups=1, top_groups=1, normalise=True, factor=1.0
    )
    assert bool(torch.isfinite(weights).all())


def test_no_tokens() -> None:
    chosen, weights = route(
        torch.empty(0, 4), torch.zeros(4), top_k=2, groups=2, top_groups=1, normalise=True, factor=1.0
    )
    assert chosen.shape == weights.shape == (0, 2)


def test_bad_arguments() -> None:
    kwargs: dict[str, Any] = {"top_k": 2, "top_groups": 1, "normalise": True, "factor": 1.0}
    logits, bias = torch.randn(3, 8), torch.zeros(8)
    with pytest.raises(ValueError, match="float32; got logits torch.bfloat16"):
        route(logits.bfloat16(), bias, groups=1, **kwargs)
    with pytest.raises(ValueError, match="bias torch.float64"):
        route(logits, bias.double(), groups=1, **kwargs)
    with pytest.raises(ValueError, match=r"bias \(7,\)"):
        route(logits, bias[:7], groups=1, **kwargs)
    with pytest.raises(ValueError, match="3 groups do not fit"):
        route(logits, bias, groups=3, **kwargs)
