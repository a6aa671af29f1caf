"""The training run: phases, losses, log and checkpoints. A run that was stopped goes on bit for bit where it was.

What a step does depends on the model, the optimiser's state and the step's number only: its documents are drawn from
``(seed, step)``, and nothing else is random.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from demo_model import recipe
from demo_model.attention import Mode
from demo_model.data import TEXT, Batch, Documents
from demo_model.guides import guides_of
from demo_model.model import TrainingModel
from demo_model.optimiser import Optimiser
from demo_model.recipe import Phase
from dsa_engine.config.model import ModelConfig
from dsa_engine.system.interrupts import uninterrupted

KEEP_BLOCKS = 2048  # tokens of a document from which on attention is computed again in the backward pass


@dataclass(frozen=True)
class Losses:
    """Means over a batch; ``total`` is minimised."""

    total: torch.Tensor
    main: torch.Tensor
    mtp: torch.Tensor | None
    index: list[torch.Tensor]
    guide: list[torch.Tensor]
    text: float  # loss of text tokens, nats
    values: float | None  # fraction of asked values that the model predicts; None: none was asked
    mtp_right: float  # fraction of the predictable second next tokens that the module predicts

    def figures(self) -> dict[str, Any]:
        index = [round(loss.item(), 5) for loss in self.index]
        mtp = None if self.mtp is None else round(self.mtp.item(), 5)
        guide = [round(loss.item(), 5) for loss in self.guide]
        figures = {"loss": round(self.main.item(), 5), "mtp_loss": mtp, "index_losses": index, "guide_losses": guide}
        rates = {"text": self.text, "values": self.values, "mtp_right": self.mtp_right}
        return figures | {name: None if value is None else round(value, 5) for name, value in rates.items()}


def losses(model: TrainingModel, batch: Batch, mode: Mode, mtp: bool, guide: float, bfloat16: bool) -> Losses:
    """Cross-entropy of the next token and, by the MTP module, of the one after it (equations 24 and 25), both weighted,
    the indexers' KL divergences and, weighted by ``guide``, the losses of guided heads."""
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
    weights = torch.from_numpy(batch.weights)

    def weighed(hidden: torch.Tensor, ahead: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mean loss, the loss of each target ``[B, L - ahead]``, and whether each was predicted."""
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            logits = model.lm_head(hidden[:, : tokens.shape[1] - ahead])
        logits, targets, weight = logits.to(hidden.dtype), tokens[:, ahead:], weights[:, ahead:].to(hidden.dtype)
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        right = logits.detach().argmax(dim=-1) == targets
        return (each * weight).sum() / weight.sum(), each.detach(), right

    guides = guides_of(batch, model.config.num_hidden_layers if mtp else None) if guide else None
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        outputs = model(tokens, positions, mode, mtp, guides)
    main, each, right = weighed(outputs.hidden, 1)
    total, second, mtp_right = main, None, 0.0
    if outputs.mtp_hidden is not None:
        second, _, second_right = weighed(outputs.mtp_hidden, 2)
        total = total + recipe.MTP_WEIGHT * second
        mtp_right = second_right[weights[:, 2:] > 0].float().mean().item()
    total = total + sum(outputs.index_losses) + guide * sum(outputs.guide_losses)
    text = each[weights[:, 1:] == TEXT].mean().item()
    asked = right[torch.from_numpy(batch.asked)[:, 1:]].float()
    known = asked.mean().item() if asked.numel() else None
    return Losses(total, main, second, outputs.index_losses, outputs.guide_losses, text, known, mtp_right)


class Run:
    """One training run in a folder: ``state.pt``, ``log.jsonl``.

    Args:
        config: configuration of the model.
        documents: source of the batches.
        phases: the phases, in order.
        folder: folder of the run; a state in it is continued.
        bfloat16: matrix products in bfloat16, sums and the optimiser in float32.
    """

    def __init__(
        self, config: ModelConfig, documents: Documents, phases: tuple[Phase, ...], folder: Path, bfloat16: bool = True
    ):
        self.documents, self.phases, self.folder, self.bfloat16 = documents, phases, folder, bfloat16
        self.model = TrainingModel(config, recipe.SEED)
        self.optimiser = Optimiser(self.model, recipe.MUON_RATE, recipe.ADAM_RATE, recipe.WEIGHT_DECAY)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.steps = sum(phase.steps for phase in phases)
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def train(self, until: int | None = None, save_every: float = 120.0) -> Generator[dict[str, Any]]:
        """Trains to step ``until`` (default: to the end) and yields the figures of each step.

        It saves now and then, and at its end, which may be an interrupt (Ctrl-C, after the step) or ``close``.
        """
        saved = time.monotonic()
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            try:
                while self.step < min(self.steps if until is None else until, self.steps):
                    with uninterrupted():  # half a step cannot be continued
                        figures = self._step()
                        log.write(json.dumps(figures) + "\n")
                    if time.monotonic() - saved > save_every:
                        log.flush()
                        self.save()
                        saved = time.monotonic()
                    yield figures
            except (KeyboardInterrupt, GeneratorExit):
                log.flush()
                self.save()
                raise
        self.save()

    def _step(self) -> dict[str, Any]:
        start = time.monotonic()
        phase, done = self._phase()
        done_part = done / max(phase.steps - 1, 1)
        rate, index_rate, guide = (a + (b - a) * done_part for a, b in (phase.rate, phase.index_rate, phase.guide))
        rate *= min(1.0, (self.step + 1) / recipe.WARMUP_STEPS)
        index_rate *= min(1.0, (self.optimiser.steps["index"] + 1) / recipe.WARMUP_STEPS)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_((index_rate if ".indexer." in name else rate) > 0)
            parameter.grad = None
        batch = self.documents.batch(
            self.step, phase.batch, phase.length, phase.plain, phase.restate, phase.spacing, phase.jumps, phase.echo
        )
        mode = Mode(phase.kind, phase.topk, recompute=phase.length > KEEP_BLOCKS)
        result = losses(self.model, batch, mode, phase.mtp, guide, self.bfloat16)
        result.total.backward()
        self.optimiser.step(rate, index_rate)
        learns = recipe.BALANCE_SPEED if rate else 0.0
        imbalance = [round(gate.balance(learns), 3) for gate in self.model.gates()]
        figures = {"step": self.step, "phase": phase.name, "length": phase.length} | result.figures()
        self.step += 1
        self.tokens += batch.tokens.size
        self.seconds += time.monotonic() - start
        rates = {"rate": round(rate, 4), "index_rate": round(index_rate, 4), "imbalance": imbalance}
        return figures | rates | {"tokens": self.tokens, "seconds": round(self.seconds, 1)}

    def _phase(self) -> tuple[Phase, int]:
        """The phase of the next step, and the number of its finished steps."""
        for phase, first in zip(self.phases, self._first_steps()):
            if self.step < first + phase.steps:
                return phase, self.step - first
        raise ValueError(f"step {self.step} is beyond the last phase")

    def _first_steps(self) -> list[int]:
        return [sum(phase.steps for phase in self.phases[:i]) for i in range(len(self.phases))]

    def save(self) -> None:
        """Writes ``state.pt``; a run that is killed during it keeps the previous one."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "phases": [asdict(phase) for phase in self.phases],
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        torch.save(state, self.folder / "state.tmp")
        os.replace(self.folder / "state.tmp", self.folder / "state.pt")

    def _resume(self) -> None:
        path, log = self.folder / "state.pt", self.folder / "log.jsonl"
        if not path.is_file():
            log.write_text("", encoding="utf-8")
            return
        state = torch.load(path, weights_only=True)
        begun = [asdict(phase) for phase, first in zip(self.phases, self._first_steps()) if first < state["step"]]
        if state["phases"][: len(begun)] != begun:  # phases that have not begun may still change
            raise ValueError(f"{self.folder} holds a run of other phases; give another folder, or remove it")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)[: self.step]  # later steps are done again
        log.write_text("".join(lines), encoding="utf-8")
