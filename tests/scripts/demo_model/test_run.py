"""The training run: it can be stopped and continues bit for bit; a phase trains only its parameters."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from demo_model.data import WORDS, Documents
from demo_model.loop import Run
from demo_model.optimiser import orthogonalise
from demo_model.pictures import plot_losses
from demo_model.prepare import documents_of
from demo_model.recipe import Phase, model_config
from demo_model.vocabulary import train_tokenizer
from dsa_engine.config.model import ModelConfig

TEXTS = {"text": "def function(self, value):\n    return value\n\nA line of plain text.\n" * 40}
PHASES = (
    Phase("dense", "dense", 3, 2, 48, guide=(1.0, 0.0), plain=0.5, spacing=(7.0, 9.0)),
    Phase("warm-up", "warmup", 3, 2, 48, rate=(0.0, 0.0), index_rate=(1.0, 1.0)),
    Phase("sparse", "sparse", 3, 2, 48, 16, rate=(0.5, 0.1), index_rate=(0.5, 0.1), plain=0.0),
)


@pytest.fixture(scope="module")
def documents() -> Documents:
    return documents_of(train_tokenizer(TEXTS.values(), WORDS, vocab_size=540), TEXTS)


def start(documents: Documents, folder: Path, phases: tuple[Phase, ...] = PHASES) -> Run:
    sizes = {"hidden_size": 32, "index_head_dim": 32, "intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16}
    sizes |= {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_attention_heads": 4, "vocab_size": 540}
    return Run(ModelConfig.from_dict(model_config() | sizes), documents, phases, folder)


def test_a_stopped_run_goes_on_bit_for_bit(
    documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = start(documents, tmp_path / "whole")
    figures = list(whole.train())
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    for until in (2, 4, 5, 8, None):  # a new object each time, as in another process
        parts = start(documents, tmp_path / "parts")
        list(parts.train(until))
        parts = start(documents, tmp_path / "parts")
        if until in (2, 5):  # Ctrl-C in a step, and while a step's figures are shown
            with pytest.raises(KeyboardInterrupt), closing(parts.train()) as steps, monkeypatch.context() as patch:
                if until == 2:
                    patch.setattr(parts, "_phase", lambda run=parts: interrupt() or Run._phase(run))
                next(steps)
                interrupt()
            assert start(documents, tmp_path / "parts").step == until + 1
    assert parts.step == whole.step == 9
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    assert [len(log) for log in logs] == [9, 9]
    assert all(_timeless(a) == _timeless(b) for a, b in zip(*logs, strict=True))
    assert _timeless(json.dumps(figures[-1])) == _timeless(logs[0][-1])
    plot_losses([json.loads(line) for line in logs[0]], str(tmp_path / "losses.png"))
    assert (tmp_path / "losses.png").stat().st_size > 10_000


def _timeless(line: str) -> dict[str, object]:
    return {name: value for name, value in json.loads(line).items() if name != "seconds"}


def test_each_phase_trains_what_it_should(documents: Documents, tmp_path: Path) -> None:
    run = start(documents, tmp_path)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    def changed() -> set[str]:
        now = run.model.state_dict()
        names = {name for name, tensor in now.items() if not torch.equal(tensor, before[name])}
        before.update({name: tensor.clone() for name, tensor in now.items()})
        return names

    list(run.train(3))
    main = changed()
    assert len(main) > 40 and not any(".indexer." in name for name in main)
    list(run.train(6))
    index = changed()
    assert len(index) == 4 * 5 and all(".indexer." in name for name in index)  # all parts of all four indexers
    list(run.train())
    assert changed() >= main - {name for name in main if "e_score" in name} | index


def test_phases_that_have_begun_cannot_change(documents: Documents, tmp_path: Path) -> None:
    list(start(documents, tmp_path).train(4))
    later = replace(PHASES[2], steps=1)
    assert start(documents, tmp_path, (*PHASES[:2], later)).steps == 7
    with pytest.raises(ValueError, match="other phases"):
        start(documents, tmp_path, (PHASES[0], replace(PHASES[1], batch=1), PHASES[2]))


def test_muon_makes_matrices_orthogonal() -> None:
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5 and values.max() < 1.4
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    aligned = (u.mT @ orthogonalise(matrices) @ v.mT).diagonal(dim1=-2, dim2=-1)
    assert aligned.min() > 0.5  # the same singular vectors
