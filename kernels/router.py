"""Router of the mixture of experts: sigmoid scores, choice limited to the best groups (DeepSeek-V3, section 2.1.2).

    s = sigmoid(x · Wᵀ);  choice = s + bias;  a group's rank is the sum of its 2 best choices;
    the top experts are chosen within the top groups;  weights = s of the chosen, normalised, times a factor

The bias only chooses, it never weighs. Everything is float32.
"""

from __future__ import annotations

import torch


def route_reference(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, groups: int, top_groups: int, normalise: bool, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        ranks = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = ranks.topk(top_groups, dim=-1, sorted=False).indices
        closed = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts.int(), weights * factor


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for every token.

    Args:
        logits: float32 ``[T, experts]``.
        bias: float32 ``[experts]``, the correction bias.

    Returns:
        expert numbers ``[T, top_k]`` int32 in no particular order, and their weights ``[T, top_k]`` float32.
    """
    if logits.dtype != torch.float32 or bias.dtype != torch.float32:
        raise ValueError(f"the router works in float32; got logits {logits.dtype} and bias {bias.dtype}")
    if logits.shape[-1] != bias.shape[0] or logits.shape[-1] % groups:
        raise ValueError(f"logits {tuple(logits.shape)}, bias {tuple(bias.shape)} and {groups} groups do not fit")
    return route_reference(logits, bias, top_k, groups, top_groups, normalise, factor)
