"""Muon for matrices, AdamW for everything else.

Muon: momentum, then the nearest orthogonal matrix by five Newton-Schulz steps (Jordan et al., 2024), with the scale of
Moonlight (arXiv 2502.16982, equation 4), so that one learning rate suits both. At this size it learns several times
faster per token than AdamW, and takes 5% of a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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


class Optimiser:
    """Muon and AdamW over named groups of parameters, with a learning rate per group.

    Args:
        model: the model to optimise.
        muon_rate: highest learning rate of matrices.
        adam_rate: highest learning rate of embeddings, head, router, norms and biases.
        weight_decay: weight decay of matrices.
    """

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, weight_decay: float):
        self.muon_rate, self.adam_rate, self.weight_decay = muon_rate, adam_rate, weight_decay
        self.parameters = dict(model.named_parameters())
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            kinds = ("momentum",) if is_matrix(name, parameter) else ("mean", "square")
            self.state[name] = {kind: torch.zeros_like(parameter) for kind in kinds}
        self.steps = {"main": 0, "index": 0}

    @torch.no_grad()
    def step(self, main: float, index: float) -> None:
        """One step; the rates are fractions of the highest. A group with rate 0 is not changed."""
        for group, factor in (("main", main), ("index", index)):
            if not factor:
                continue
            self.steps[group] += 1
            for name, parameter in self.parameters.items():
                if (".indexer." in name) != (group == "index") or parameter.grad is None:
                    continue
                if "momentum" in self.state[name]:
                    self._muon(name, parameter, factor * self.muon_rate)
                else:
                    self._adam(name, parameter, factor * self.adam_rate, self.steps[group])

    def _muon(self, name: str, parameter: nn.Parameter, rate: float) -> None:
        assert parameter.grad is not None
        momentum = self.state[name]["momentum"].lerp_(parameter.grad, 0.05)
        update = orthogonalise(parameter.grad.lerp(momentum, 0.95))
        parameter.mul_(1 - rate * self.weight_decay)
        parameter.sub_(update, alpha=rate * 0.2 * max(parameter.shape[-2:]) ** 0.5)

    def _adam(self, name: str, parameter: nn.Parameter, rate: float, step: int) -> None:
        assert parameter.grad is not None
        mean = self.state[name]["mean"].lerp_(parameter.grad, 0.1)
        square = self.state[name]["square"].lerp_(parameter.grad.square(), 0.05)
        corrected = (square / (1 - 0.95**step)).sqrt_().add_(1e-10)
        parameter.sub_(mean / corrected, alpha=rate / (1 - 0.9**step))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, kinds in saved["state"].items():
            for kind, value in kinds.items():
                self.state[name][kind].copy_(value)
        self.steps = dict(saved["steps"])


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon optimises the parameter: a matrix or stack of matrices, but no table with a row per token, expert or
    head."""
    tables = ("embed_tokens", "lm_head", "mlp.gate.weight", "weights_proj")
    return parameter.dim() >= 2 and not any(table in name for table in tables)
