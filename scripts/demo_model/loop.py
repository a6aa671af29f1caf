"""The training run: phases, losses, log and state. A run that was stopped goes on where it was last saved.

What a step does depends on the model, the optimisers' state and the step's number only: its documents are drawn from
``(seed, step)``, and nothing else is random.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from demo_model import recipe
from demo_model.attention import Mode
from demo_model.data import TEXT, Batch, Documents
from demo_model.guides import guides_of
from demo_model.model import TrainingModel
from demo_model.optimiser import optimisers
from demo_model.recipe import Phase

SAVE_EVERY = 50  # steps


def losses(
    model: TrainingModel, batch: Batch, mode: Mode, mtp: bool, guide: float
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss to be minimised, and figures for the log.

    Cross-entropy of the next token and, by the MTP module, of the one after it (equations 24 and 25 of the V3 report),
    both weighed by token; the indexers' KL divergences; and, weighed by ``guide``, the losses of guided heads.
    """
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
    weights, figures = torch.from_numpy(batch.weights), {}
    guides = guides_of(batch, model.config.num_hidden_layers if mtp else None) if guide else None
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(tokens, positions, mode, mtp, guides)
    total = sum(outputs.index_losses) + guide * sum(outputs.guide_losses)
    predicted = [("loss", outputs.hidden, 1, 1.0), ("mtp_loss", outputs.mtp_hidden, 2, recipe.MTP_WEIGHT)]
    for name, hidden, ahead, factor in predicted:
        if hidden is None:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(hidden[:, : tokens.shape[1] - ahead])
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


class Run:
    """One training run in a folder: ``state.pt``, ``log.jsonl``.

    Args:
        raw: keys of the model's ``config.json``.
        documents: source of the batches.
        phases: the phases, in order.
        folder: folder of the run; a state in it is continued.

    Raises:
        ValueError: the folder has a run of other phases.
    """

    def __init__(self, raw: dict[str, Any], documents: Documents, phases: tuple[Phase, ...], folder: Path):
        self.documents, self.phases, self.folder = documents, phases, folder
        self.model = TrainingModel(raw, recipe.SEED)
        self.optimisers = optimisers(self.model, recipe.WEIGHT_DECAY)
        self.step, self.steps = 0, sum(phase.steps for phase in phases)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.pt").is_file():
            self._resume(torch.load(folder / "state.pt", weights_only=True))

    def train(self, until: int | None = None) -> Iterator[dict[str, Any]]:
        """Trains to step ``until`` (default: to the end), yields the figures of each step, and saves now and then."""
        with (self.folder / "log.jsonl").open("a" if self.step else "w", encoding="utf-8") as log:
            while self.step < min(self.steps if until is None else until, self.steps):
                figures = self._step()
                log.write(json.dumps(figures) + "\n")
                if self.step % SAVE_EVERY == 0:
                    log.flush()
                    self.save()
                yield figures
        self.save()

    def _step(self) -> dict[str, Any]:
        phase, done, index_steps = self._phase()
        part = done / max(phase.steps - 1, 1)
        rate, index_rate, guide = (a + (b - a) * part for a, b in (phase.rate, phase.index_rate, phase.guide))
        rate *= min(1.0, (self.step + 1) / recipe.WARMUP_STEPS)
        index_rate *= min(1.0, (index_steps + 1) / recipe.WARMUP_STEPS)
        for optimiser, highest in zip(self.optimisers, (recipe.MUON_RATE, recipe.ADAM_RATE), strict=True):
            for group, fraction in zip(optimiser.param_groups, (rate, index_rate), strict=True):
                group["lr"] = fraction * highest
                for parameter in group["params"]:
                    parameter.requires_grad_(fraction > 0)
                    parameter.grad = None
        batch = self.documents.batch(self.step, phase)
        mode = Mode(phase.kind, phase.topk)
        total, figures = losses(self.model, batch, mode, phase.mtp, guide)
        total.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        self.model.balance(recipe.BALANCE_SPEED if rate else 0.0)
        self.step += 1
        return {"step": self.step - 1, "phase": phase.name} | figures

    def _phase(self) -> tuple[Phase, int, int]:
        """The phase of the next step, the number of its finished steps, and that of the indexers' finished steps."""
        first = index_steps = 0
        for phase in self.phases:
            if self.step < first + phase.steps:
                done = self.step - first
                return phase, done, index_steps + done * any(phase.index_rate)
            first += phase.steps
            index_steps += phase.steps * any(phase.index_rate)
        raise ValueError(f"step {self.step} is beyond the last phase")

    def save(self) -> None:
        """Writes ``state.pt``; a run that is killed during it keeps the previous one."""
        state = {
            "phases": [asdict(phase) for phase in self.phases],
            "step": self.step,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        torch.save(state, self.folder / "state.tmp")
        os.replace(self.folder / "state.tmp", self.folder / "state.pt")

    def _resume(self, state: dict[str, Any]) -> None:
        if state["phases"] != [asdict(phase) for phase in self.phases]:
            raise ValueError(f"{self.folder} holds a run of other phases; give another folder, or remove it")
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = state["step"]
        log = self.folder / "log.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)[: self.step]  # later steps are done again
        log.write_text("".join(lines), encoding="utf-8")
