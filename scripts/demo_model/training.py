"""The training: guides, losses, optimisers, and the steps of the phases.

A step's documents are drawn from ``(seed, step)``, and nothing else is random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import AdamW, Muon, Optimizer

from demo_model import recipe
from demo_model.data import TEXT, Batch, Documents
from demo_model.model import Guides, TrainingModel
from demo_model.recipe import Phase


def guides_of(batch: Batch, mtp_layer: int | None) -> Guides:
    """Targets ``[B, L]`` for some attention heads in the first phases, by layer and head.

    Without them a small model needs a long plateau until two layers fit together: one that copies the previous tokens
    to a token, and one that searches for them. So in the first layer four heads attend to the 1st to 4th token before;
    in the second layer, for tokens of an answer that repeat earlier ones, one head attends to a value's position in its
    fact, another to that of any other copied token; in the MTP module, if it learns, the same for the token after the
    next one.
    """
    rows, length = batch.tokens.shape
    positions = np.broadcast_to(np.arange(length), (rows, length))
    before = {head: np.maximum(positions - head - 1, -1) for head in range(4)}
    guides = {0: before, 1: _said_before(batch, 1)}
    if mtp_layer is not None:
        # Row i of the module holds token i + 1 and predicts token i + 2.
        guides[mtp_layer] = {h: np.where(t >= 0, t - 1, -1)[:, :-1] for h, t in _said_before(batch, 2).items()}
    return {layer: {h: torch.from_numpy(t.copy()) for h, t in heads.items()} for layer, heads in guides.items()}


def _said_before(batch: Batch, ahead: int) -> dict[int, np.ndarray]:
    """Earlier position of the token ``ahead`` of each token: values for head 0, any other copied token for head 1."""
    targets = {}
    for head, wanted in enumerate((batch.asked, ~batch.asked)):
        sources = np.full_like(batch.sources, -1)
        sources[:, :-ahead] = np.where(wanted, batch.sources, -1)[:, ahead:]
        targets[head] = sources
    return targets


def losses(model: TrainingModel, batch: Batch, phase: Phase, guide: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss to be minimised, and figures for the log.

    Cross-entropy of the next token and, by the MTP module, of the one after it (equations 24 and 25 of the V3 report),
    both weighed by token; the indexers' KL divergences; and, weighed by ``guide``, the losses of guided heads.
    """
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
    weights, figures = torch.from_numpy(batch.weights), {}
    guides = guides_of(batch, model.c.num_hidden_layers if phase.mtp else None) if guide else None
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(tokens, positions, phase.topk, phase.mtp, guides)
    total = sum(outputs.index_losses, tokens.new_zeros((), dtype=torch.float32)) + guide * sum(outputs.guide_losses)
    predicted = [("loss", outputs.hidden, 1, 1.0), ("mtp_loss", outputs.mtp_hidden, 2, recipe.MTP_WEIGHT)]
    for name, hidden, ahead, factor in predicted:
        if hidden is None:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(hidden[:, : tokens.shape[1] - ahead], model.w.lm_head)
        targets, weight = tokens[:, ahead:], weights[:, ahead:]
        each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        loss = (each * weight).sum() / weight.sum()
        total, figures[name] = total + factor * loss, loss.item()
        if ahead == 1:
            right = logits.detach().argmax(dim=-1) == targets
            figures["text"] = each.detach()[weight == TEXT].mean().item()
            asked = right[torch.from_numpy(batch.asked)[:, 1:]].float()
            figures["values"] = asked.mean().item() if len(asked) else 0.0
    return total, figures | {"index_losses": [loss.item() for loss in outputs.index_losses]}


def optimisers(model: TrainingModel) -> list[Optimizer]:
    """Muon for matrices, AdamW for everything else, each with two groups: the main model's tensors and the indexers'.
    The rates are set at every step; Muon's is scaled as in Moonlight (arXiv 2502.16982), so that one suits both."""
    muon, adam = ([{"params": list[torch.Tensor]()} for _ in range(2)] for _ in range(2))
    for name, tensor in model.tensors.items():
        # A table with a row per token, expert or head is no matrix.
        table = any(table in name for table in ("embed_tokens", "lm_head", "mlp.gate.weight", "weights_proj"))
        if tensor.requires_grad:
            (muon if tensor.dim() == 2 and not table else adam)[".indexer." in name]["params"].append(tensor)
    return [
        Muon(muon, weight_decay=recipe.WEIGHT_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        AdamW(adam, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]


def train(model: TrainingModel, documents: Documents, phases: Sequence[Phase]) -> Iterator[dict[str, Any]]:
    """Trains ``model`` through all phases; yields the figures of each step."""
    both, step, index_steps = optimisers(model), 0, 0
    for phase in phases:
        for done in range(phase.steps):
            part = done / max(phase.steps - 1, 1)
            rate, index_rate, guide = (a + (b - a) * part for a, b in (phase.rate, phase.index_rate, phase.guide))
            index_steps += any(phase.index_rate)
            warm = (min(1.0, steps / recipe.WARMUP_STEPS) for steps in (step + 1, index_steps))
            fractions = [a * b for a, b in zip((rate, index_rate), warm, strict=True)]
            for optimiser, highest in zip(both, (recipe.MUON_RATE, recipe.ADAM_RATE), strict=True):
                for group, fraction in zip(optimiser.param_groups, fractions, strict=True):
                    group["lr"] = fraction * highest
                    for tensor in group["params"]:
                        tensor.requires_grad_(fraction > 0)
                        tensor.grad = None
            total, figures = losses(model, documents.batch(step, phase), phase, guide)
            total.backward()
            for optimiser in both:
                optimiser.step()
            model.balance(recipe.BALANCE_SPEED if rate else 0.0)
            yield {"step": step, "phase": phase.name} | figures
            step += 1
