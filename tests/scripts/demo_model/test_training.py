"""The training: its forward pass against the engine, its losses, and a run of a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from demo_model import model as module
from demo_model.data import Documents
from demo_model.model import TrainingModel, attend
from demo_model.recipe import Phase
from demo_model.training import train
from dsa_engine import LLM
from dsa_engine.demo import trained_folder
from dsa_engine.reference import dsa
from train_demo import write_checkpoint

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
    Phase("dense", 3, 2, 48, guide=(1.0, 0.0), plain=0.5, spacing=(7.0, 9.0)),
    Phase("warm-up", 3, 2, 48, 0, rate=(0.0, 0.0), index_rate=(1.0, 1.0)),
    Phase("sparse", 3, 2, 48, 16, rate=(0.5, 0.1), index_rate=(0.5, 0.1), plain=0.0),
)


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents({"text": "def function(self, value):\n    return value\n\nA line of plain text.\n" * 40})


def tiny(folder: Path, fp8: bool = False, dtype: torch.dtype = torch.float32) -> TrainingModel:
    raw = json.loads((trained_folder() / "config.json").read_text()) | TINY
    if not fp8:
        raw |= {"torch_dtype": "float32"}
        del raw["quantization_config"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return TrainingModel(folder, seed=0, dtype=dtype)


def random_model(folder: Path, **options: Any) -> TrainingModel:
    """Every tensor random, also those that training starts at zero or one."""
    model, generator = tiny(folder, **options), torch.Generator().manual_seed(1)
    for tensor in model.tensors.values():
        if tensor.dim() == 1 and tensor.requires_grad:
            torch.nn.init.normal_(tensor.data, 1.0, 0.1, generator=generator)
        elif not tensor.any():
            torch.nn.init.normal_(tensor.data, std=0.3 * tensor.shape[-1] ** -0.5, generator=generator)
    return model


def row(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 768, (1, length), generator=torch.Generator().manual_seed(length))
    return tokens, torch.arange(length)[None]


@pytest.mark.parametrize("fp8", [False, True])
def test_the_checkpoint_loads_in_the_engine_and_agrees(tmp_path: Path, fp8: bool) -> None:
    model = random_model(tmp_path / "config", fp8=fp8)
    write_checkpoint(model, tmp_path / "model")
    tokens, positions = row(150)  # beyond index_topk: most tokens select
    llm = LLM(tmp_path / "model", device="cpu", max_model_len=256, cache_memory="16MiB", progress=False)
    engine = llm.prompt_logits(tokens[0].tolist())
    with torch.no_grad():
        logits = (model(tokens, positions, TINY["index_topk"]).hidden @ model.w.lm_head.T)[0]
    relative = (logits - engine).norm() / engine.norm()
    if fp8:
        assert 1e-5 < relative < 0.3  # three bits of mantissa
    else:
        rows = (logits - engine).norm(dim=-1) / engine.norm(dim=-1)
        assert (rows > 1e-4).float().mean() < 0.01 and relative < 1e-4


def test_blocks_and_recomputation_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = random_model(tmp_path, dtype=torch.float64)
    tokens, positions = row(100)
    gradients = []
    for rows, keep in ((256, 2048), (32, 2048), (32, 0)):
        monkeypatch.setattr(module, "ROWS", rows)
        monkeypatch.setattr(module, "KEEP_BLOCKS", keep)
        for tensor in model.tensors.values():
            tensor.grad = None
        outputs = model(tokens, positions, 24)
        assert outputs.mtp_hidden is not None
        (outputs.hidden.sum() + outputs.mtp_hidden.sum() + sum(outputs.index_losses)).backward()
        gradients.append(torch.cat([t.grad.flatten() for t in model.tensors.values() if t.grad is not None]))
        assert len(outputs.index_losses) == 4
    assert torch.allclose(gradients[0], gradients[1]) and torch.allclose(gradients[1], gradients[2])


@pytest.mark.parametrize("topk", [0, 4])
def test_attention_and_indexer_gradients(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", 5)
    generator, c = torch.Generator().manual_seed(3), dsa.Config.read(trained_folder())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, rows = random(1, 9, 2, 160), random(1, 9, 160)
    index = (random(1, 9, 12, 4), random(1, 9, 12), random(1, 9, 4))
    assert torch.autograd.gradcheck(lambda *t: attend(*t, *index, c, topk)[0], (q, rows), fast_mode=True)
    # The loss reaches the indexer only; towards the attention it is a constant.
    assert torch.autograd.gradcheck(lambda *i: attend(q.detach(), rows.detach(), *i, c, topk)[1], index, fast_mode=True)
    loss = attend(q, rows, *index, c, topk)[1]
    gradients = torch.autograd.grad(loss, (q, rows), allow_unused=True, retain_graph=True)
    assert all(g is None or not g.any() for g in gradients)


def test_the_mtp_module_sees_the_next_token(tmp_path: Path) -> None:
    model = random_model(tmp_path)
    tokens, positions = row(30)
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % 768
    with torch.no_grad():
        outputs, others = (model(t, positions, None).mtp_hidden for t in (tokens, changed))
    assert outputs.shape == (1, 29, TINY["hidden_size"])
    # Row i knows tokens up to i + 1 and nothing later.
    assert torch.allclose(outputs[:, :19], others[:, :19], atol=1e-5)
    assert not torch.allclose(outputs[:, 19], others[:, 19], atol=1e-2)


def test_each_phase_trains_only_its_tensors_and_a_run_can_be_repeated(documents: Documents, tmp_path: Path) -> None:
    model, again = tiny(tmp_path), tiny(tmp_path)
    before = {name: tensor.detach().clone() for name, tensor in model.tensors.items()}
    changed: list[set[str]] = []
    log = []
    for figures in train(model, documents, PHASES):
        log.append(figures)
        if figures["step"] % 3 == 2:
            now = {name: tensor.detach().clone() for name, tensor in model.tensors.items()}
            changed.append({name for name, tensor in now.items() if not torch.equal(tensor, before[name])})
            before = now
    main, index, both = changed
    assert len(main) > 40 and not any(".indexer." in name for name in main)
    assert len(index) == 4 * 5 and all(".indexer." in name for name in index)  # all parts of all four indexers
    assert both >= {name for name in main if ".experts." not in name and "e_score" not in name} | index
    assert [figures["step"] for figures in log] == list(range(9)) and log == [*train(again, documents, PHASES)]
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in model.tensors.items())


def test_the_router_balances(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    x = torch.randn(400, TINY["hidden_size"], generator=torch.Generator().manual_seed(6)) + 0.5
    w, imbalances = model.w.model.layers[1].mlp, []
    for _ in range(200):
        load = torch.bincount(dsa.route(w, model.c, x)[0].flatten(), minlength=TINY["n_routed_experts"]).float()
        model.loads[1] = load
        imbalances.append(float(load.max() / load.mean()))
        model.balance(0.01)
    assert imbalances[-1] < 1.3 < imbalances[0]
