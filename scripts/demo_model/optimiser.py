"""Muon for matrices, AdamW for everything else.

Muon: momentum, then the nearest orthogonal matrix by five Newton-Schulz steps (Jordan et al., 2024), with the scale of
Moonlight (arXiv 2502.16982, equation 4), so that one learning rate suits both. PyTorch's own takes no stacks of
matrices, which the experts are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

# Coefficients of the quintic iteration by its authors: singular values end between about 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """``[…, rows, columns]`` to matrices with the same singular vectors and singular values of about 1."""
    x = matrices.to(torch.bfloat16)
    turned = x.shape[-2] > x.shape[-1]
    if turned:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if turned else x).to(matrices.dtype)


class Muon(Optimizer):
    """Optimises parameters that are matrices ``[rows, columns]`` or stacks of them ``[…, rows, columns]``."""

    def __init__(self, groups: Iterable[dict[str, Any]], weight_decay: float):
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 0.05)
                update = orthogonalise(parameter.grad.lerp(momentum, 0.95))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update, alpha=group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5)


def optimisers(model: nn.Module, weight_decay: float) -> tuple[Muon, AdamW]:
    """Each with two groups: the main model's parameters and the indexers'. The rates are set at every step."""
    muon: tuple[list[nn.Parameter], ...] = ([], [])
    adam: tuple[list[nn.Parameter], ...] = ([], [])
    for name, parameter in model.named_parameters():
        # A table with a row per token, expert or head is no matrix.
        table = any(table in name for table in ("embed_tokens", "lm_head", "mlp.gate.weight", "weights_proj"))
        (muon if parameter.dim() >= 2 and not table else adam)[".indexer." in name].append(parameter)
    adams = AdamW([{"params": group} for group in adam], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    return Muon([{"params": group} for group in muon], weight_decay), adams
