"""The router against the paper's description, step by step in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsa_engine.kernels.moe.router import route

pytestmark = pytest.mark.usefixtures("on_a_cpu")


def naive(
    logits: list[float], bias: list[float], top_k: int, groups: int, top_groups: int, normalise: bool, factor: float
) -> dict[int, float]:
    """Python's sort is stable: the lower number of equals comes first."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(choice) // groups
    ranks = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    best_groups = sorted(range(groups), key=lambda g: -ranks[g])[:top_groups]
    allowed = [e for e in range(len(choice)) if e // size in best_groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    total = sum(scores[e] for e in chosen) if normalise else 1.0
    return {e: scores[e] / total * factor for e in chosen}


def check(logits: torch.Tensor, bias: torch.Tensor, device: str, **kwargs: Any) -> None:
    topk_ids, topk_weights = route(logits.to(device), bias.to(device), **kwargs)
    assert (topk_ids.dtype, topk_weights.dtype) == (torch.int32, torch.float32)
    assert topk_ids.shape == topk_weights.shape == (logits.shape[0], kwargs["top_k"])
    for row in range(logits.shape[0]):
        expected = naive(logits[row].double().tolist(), bias.double().tolist(), **kwargs)
        assert topk_ids[row].tolist() == list(expected)  # best first
        assert topk_weights[row].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    "experts, top_k, groups, top_groups",
    [
        (12, 3, 3, 2),
        (16, 4, 4, 2),
        (8, 8, 1, 1),
        (6, 1, 1, 1),
        (20, 5, 10, 3),
        (12, 4, 2, 2),
        (12, 4, 2, 1),
        (24, 4, 3, 1),
    ],
)
def test_choice_and_weights(
    experts: int, top_k: int, groups: int, top_groups: int, normalise: bool, device: str
) -> None:
    g = torch.Generator().manual_seed(experts)
    logits, bias = torch.randn(21, experts, generator=g) * 2, torch.randn(experts, generator=g) * 0.3
    check(logits, bias, device, top_k=top_k, groups=groups, top_groups=top_groups, normalise=normalise, factor=2.5)


@pytest.mark.parametrize("tokens", [1, 67])
@pytest.mark.parametrize("groups, top_groups", [(8, 4), (1, 1)], ids=["DeepSeek-V3.2", "GLM-5"])
def test_released_sizes(groups: int, top_groups: int, tokens: int, device: str) -> None:
    g = torch.Generator().manual_seed(tokens)
    logits, bias = torch.randn(tokens, 256, generator=g), torch.randn(256, generator=g) * 0.1 + 4
    check(logits, bias, device, top_k=8, groups=groups, top_groups=top_groups, normalise=True, factor=2.5)


@pytest.mark.parametrize("tokens", [1, 66])
@pytest.mark.parametrize("groups, top_groups", [(1, 1), (4, 2)])
def test_the_lower_of_equals_is_chosen(groups: int, top_groups: int, tokens: int, device: str) -> None:
    """Whole experts tie, and whole groups: logits of three values only."""
    logits = torch.randint(0, 3, (tokens, 16), generator=torch.Generator().manual_seed(1)).float()
    kwargs: dict[str, Any] = {"top_k": 5, "groups": groups, "top_groups": top_groups, "normalise": True, "factor": 1.0}
    check(logits, torch.zeros(16), device, **kwargs)
    check(torch.zeros(tokens, 16), torch.zeros(16), device, **kwargs)


@pytest.mark.parametrize("tokens", [1, 67])
def test_rows_that_are_no_tokens_choose_no_expert(tokens: int, device: str) -> None:
    g = torch.Generator().manual_seed(tokens)
    logits, bias = torch.randn(tokens, 24, generator=g).to(device), torch.randn(24, generator=g).to(device)
    token_mask = (torch.arange(tokens) % 3 > 0).to(device)
    kwargs: dict[str, Any] = {"top_k": 4, "groups": 3, "top_groups": 2, "normalise": True, "factor": 2.5}
    all_ids, topk_weights = route(logits, bias, **kwargs)
    topk_ids, same = route(logits, bias, **kwargs, token_mask=token_mask)
    assert torch.equal(topk_ids, torch.where(token_mask[:, None], all_ids, -1)) and torch.equal(same, topk_weights)
    with pytest.raises(ValueError, match="token_mask must be bool"):
        route(logits, bias, **kwargs, token_mask=token_mask[:-1])


def choose(logits: torch.Tensor, bias: torch.Tensor, device: str, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    how = {"groups": 1, "top_groups": 1, "normalise": True, "factor": 1.0} | given
    return route(logits.to(device), bias.to(device), **how)  # type: ignore[arg-type]


def test_the_bias_chooses_but_never_weighs(device: str) -> None:
    logits, bias = torch.tensor([[3.0, 2.0, -4.0, -5.0]]), torch.tensor([0.0, 0.0, 10.0, 10.0])
    topk_ids, topk_weights = choose(logits, bias, device, top_k=2, normalise=False)
    assert topk_ids[0].tolist() == [2, 3]
    assert topk_weights[0].tolist() == pytest.approx([1 / (1 + math.exp(4)), 1 / (1 + math.exp(5))])


def test_very_negative_choices_still_stay_within_the_best_groups(device: str) -> None:
    """Closed groups are worth −inf, not 0: a bias far below zero does not let their experts in."""
    bias = torch.tensor([-9.0, -9.1, -9.2, -9.3, -20.0, -20.0, -20.0, -20.0])
    topk_ids, _ = choose(torch.zeros(1, 8), bias, device, top_k=3, groups=2)
    assert sorted(topk_ids[0].tolist()) == [0, 1, 2]


def test_scores_that_vanish_are_normalised_without_nan(device: str) -> None:
    _, topk_weights = choose(torch.full((1, 4), -200.0), torch.zeros(4), device, top_k=2)
    assert bool(torch.isfinite(topk_weights).all())


@pytest.mark.parametrize("groups, top_groups", [(1, 1), (3, 2)])
def test_nan_chooses_valid_experts(groups: int, top_groups: int, device: str) -> None:
    """A broken model gives NaN, not an expert that does not exist."""
    logits = torch.full((2, 12), float("nan"))
    topk_ids, _ = choose(logits, torch.zeros(12), device, top_k=3, groups=groups, top_groups=top_groups)
    assert all(len(set(row)) == 3 and set(row) <= set(range(12)) for row in topk_ids.tolist())


def test_no_tokens(device: str) -> None:
    topk_ids, topk_weights = choose(torch.empty(0, 4), torch.zeros(4), device, top_k=2, groups=2)
    assert topk_ids.shape == topk_weights.shape == (0, 2)
