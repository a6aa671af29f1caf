"""The training: its forward pass against the engine, its losses, and a run of a few steps that is stopped between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo_model import attention
from demo_model.attention import Mode, attend
from demo_model.corpus import documents_of
from demo_model.data import Documents
from demo_model.export import write_checkpoint
from demo_model.loop import Run
from demo_model.model import MTPLayer, TrainingModel
from demo_model.optimiser import orthogonalise
from demo_model.recipe import Phase, model_config
from dsa_engine import LLM

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "index_head_dim": 32,
    "index_topk": 24,
    "intermediate_size": 48,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
PHASES = (
    Phase("dense", "dense", 3, 2, 48, guide=(1.0, 0.0), plain=0.5, spacing=(7.0, 9.0)),
    Phase("warm-up", "warmup", 3, 2, 48, rate=(0.0, 0.0), index_rate=(1.0, 1.0)),
    Phase("sparse", "sparse", 3, 2, 48, 16, rate=(0.5, 0.1), index_rate=(0.5, 0.1), plain=0.0),
)


@pytest.fixture(scope="module")
def documents() -> Documents:
    return documents_of({"text": "def function(self, value):\n    return value\n\nA line of plain text.\n" * 40})


def tiny_config(**other: Any) -> dict[str, Any]:
    raw = model_config() | TINY | {"torch_dtype": "float32"} | other
    del raw["quantization_config"]
    return raw


def random_model() -> TrainingModel:
    """Every parameter random, also those that training starts at zero."""
    model = TrainingModel(tiny_config(), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, 1.0, 0.1, generator=generator)
        elif not parameter.data.any():
            torch.nn.init.normal_(parameter.data, std=0.3 * parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def row(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 768, (1, length), generator=torch.Generator().manual_seed(length)), torch.arange(length)[
        None
    ]


@pytest.mark.parametrize("fp8", [False, True])
def test_the_checkpoint_loads_in_the_engine_and_agrees(tmp_path: Path, fp8: bool) -> None:
    model = random_model()
    write_checkpoint(model, model_config() | TINY if fp8 else tiny_config(), tmp_path / "model")
    tokens, positions = row(150)  # beyond index_topk: most tokens select
    llm = LLM(tmp_path / "model", device="cpu", max_model_len=256, cache_memory="16MiB", progress=False)
    engine = llm.prompt_logits(tokens[0].tolist())
    with torch.no_grad():
        logits = model.lm_head(model(tokens, positions, Mode("sparse", TINY["index_topk"])).hidden)[0]
    relative = (logits - engine).norm() / engine.norm()
    if fp8:
        assert 1e-5 < relative < 0.3  # three bits of mantissa
    else:
        rows = (logits - engine).norm(dim=-1) / engine.norm(dim=-1)
        assert (rows > 1e-4).float().mean() < 0.01 and relative < 1e-4


def test_blocks_and_recomputation_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model().double()
    tokens, positions = row(100)
    gradients = []
    for rows, keep in ((256, 2048), (32, 2048), (32, 0)):
        monkeypatch.setattr(attention, "ROWS", rows)
        monkeypatch.setattr(attention, "KEEP_BLOCKS", keep)
        model.zero_grad()
        outputs = model(tokens, positions, Mode("sparse", 24))
        (outputs.hidden.sum() + outputs.mtp_hidden.sum() + sum(outputs.index_losses)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert len(outputs.index_losses) == 4
    assert torch.allclose(gradients[0], gradients[1]) and torch.allclose(gradients[1], gradients[2])


@pytest.mark.parametrize("mode", [Mode("warmup"), Mode("sparse", 4)])
def test_attention_and_indexer_gradients(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROWS", 5)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = random(1, 2, 9, 4), random(1, 2, 9, 4), random(1, 2, 9, 3)
    index = (random(1, 9, 12, 4), random(1, 9, 4), random(1, 9, 12))
    assert torch.autograd.gradcheck(lambda *t: attend(*t, 0.5, index, mode)[0], (q, k, v), fast_mode=True)
    # The loss reaches the indexer only; towards the attention it is a constant.
    assert torch.autograd.gradcheck(
        lambda *i: attend(q.detach(), k.detach(), v, 0.5, i, mode)[1], index, fast_mode=True
    )
    loss = attend(q, k, v, 0.5, index, mode)[1]
    assert loss is not None
    gradients = torch.autograd.grad(loss, (q, k, v), allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in gradients)


def test_the_mtp_module_sees_the_next_token_and_the_normed_hidden_state() -> None:
    model = random_model()
    tokens, positions = row(30)
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % 768
    module = model.model.layers[-1]
    assert isinstance(module, MTPLayer)
    seen: list[torch.Tensor] = []
    module.eh_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        outputs, others = (model(t, positions, Mode()) for t in (tokens, changed))
        assert outputs.mtp_hidden.shape == (1, 29, TINY["hidden_size"])
        # Row i knows tokens up to i + 1 and nothing later.
        assert torch.allclose(outputs.mtp_hidden[:, :19], others.mtp_hidden[:, :19], atol=1e-5)
        assert not torch.allclose(outputs.mtp_hidden[:, 19], others.mtp_hidden[:, 19], atol=1e-2)
        embedding = model.model.embed_tokens(tokens[:, 1:])
        joined = torch.cat((module.enorm(embedding), module.hnorm(outputs.hidden[:, :-1])), dim=-1)
    assert torch.equal(seen[0], joined)


def test_a_stopped_run_goes_on_bit_for_bit(documents: Documents, tmp_path: Path) -> None:
    """And each phase trains only its parameters."""
    whole = Run(tiny_config(), documents, PHASES, tmp_path / "whole")
    before = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    changed: list[set[str]] = []
    for until in (3, 6, None):
        list(whole.train(until))
        now = whole.model.state_dict()
        changed.append({name for name, tensor in now.items() if not torch.equal(tensor, before[name])})
        before = {name: tensor.clone() for name, tensor in now.items()}
    main, index, both = changed
    assert len(main) > 40 and not any(".indexer." in name for name in main)
    assert len(index) == 4 * 5 and all(".indexer." in name for name in index)  # all parts of all four indexers
    assert both >= {name for name in main if "e_score" not in name} | index
    for until in (2, 4, 8, None):  # a new object each time, as in another process
        parts = Run(tiny_config(), documents, PHASES, tmp_path / "parts")
        list(parts.train(until))
    assert parts.step == whole.step == 9
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, parts.model.state_dict()[name]), name
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1] and [json.loads(line)["step"] for line in logs[0].splitlines()] == list(range(9))
    with pytest.raises(ValueError, match="other phases"):
        Run(tiny_config(), documents, (PHASES[0], replace(PHASES[1], batch=1), PHASES[2]), tmp_path / "parts")


def test_the_router_balances() -> None:
    model = TrainingModel(tiny_config(), seed=0)
    gate = model.gates()[0]
    x = torch.randn(400, TINY["hidden_size"], generator=torch.Generator().manual_seed(6)) + 0.5
    imbalances = []
    for _ in range(200):
        gate(x)
        imbalances.append(float(gate.load.max() / gate.load.mean()))
        model.balance(0.01)
    assert imbalances[-1] < 1.3 < imbalances[0]


def test_muon_makes_matrices_orthogonal() -> None:
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5 and values.max() < 1.4
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    aligned = (u.mT @ orthogonalise(matrices) @ v.mT).diagonal(dim1=-2, dim2=-1)
    assert aligned.min() > 0.5  # the same singular vectors
