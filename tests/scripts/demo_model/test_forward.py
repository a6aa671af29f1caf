"""The training forward against the engine, and its gradients against differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demo_model.attention import Mode, attend
from demo_model.export import write_checkpoint
from demo_model.model import Extra, Gate, MTPLayer, TrainingModel
from demo_model.recipe import model_config
from dsa_engine import LLM
from dsa_engine.config.model import ModelConfig

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "index_head_dim": 32,
    "index_n_heads": 12,
    "index_topk": 24,
    "intermediate_size": 48,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 64,
    "torch_dtype": "float32",
}


def tiny_config() -> dict[str, Any]:
    raw = model_config() | TINY
    del raw["quantization_config"]
    return raw


def random_model(raw: dict[str, Any]) -> TrainingModel:
    """Every parameter random, also those that training starts at zero."""
    model = TrainingModel(ModelConfig.from_dict(raw), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, 1.0, 0.1, generator=generator)
        elif not parameter.data.any():
            torch.nn.init.normal_(parameter.data, std=0.3 * parameter.shape[-1] ** -0.5, generator=generator)
    for gate in model.gates():
        gate.e_score_correction_bias.normal_(std=0.1, generator=generator)
    return model.eval()


def row(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, TINY["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
    return tokens, torch.arange(length)[None]


@pytest.mark.parametrize("length", [20, 150])
def test_the_forward_pass_equals_the_engine(tmp_path: Path, length: int) -> None:
    model = random_model(tiny_config())
    write_checkpoint(model, tiny_config(), tmp_path / "model", {})
    tokens, positions = row(length)  # 150 is beyond index_topk: most tokens select
    llm = LLM(tmp_path / "model", device="cpu", max_model_len=256, cache_memory="16MiB", progress=False)
    engine = llm.prompt_logits(tokens[0].tolist())
    with torch.no_grad():
        outputs = model(tokens, positions, Mode("sparse", TINY["index_topk"], rows=64))
        logits = model.lm_head(outputs.hidden)[0]
    relative = (logits - engine).norm(dim=-1) / engine.norm(dim=-1)
    assert (relative > 1e-4).float().mean() < 0.01
    assert (logits - engine).norm() / engine.norm() < 1e-4


def test_blocks_and_recomputation_change_nothing() -> None:
    model = random_model(tiny_config()).double()
    tokens, positions = row(100)
    gradients = []
    for mode in (Mode("sparse", 24, rows=100), Mode("sparse", 24, rows=33, recompute=True)):
        model.zero_grad()
        outputs = model(tokens, positions, mode)
        (outputs.hidden.square().mean() + torch.stack(outputs.index_losses).sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*gradients, strict=True))


def test_dense_attention_is_sparse_attention_that_selects_everything() -> None:
    model = random_model(tiny_config()).double()
    tokens, positions = row(60)
    with torch.no_grad():
        dense, warmup, sparse = (
            model(tokens, positions, mode).hidden for mode in (Mode(), Mode("warmup"), Mode("sparse", 60))
        )
    assert torch.allclose(dense, warmup) and torch.allclose(dense, sparse)


@pytest.mark.parametrize("mode", [Mode("warmup", rows=5), Mode("sparse", 4, rows=5)])
def test_attention_and_indexer_gradients(mode: Mode) -> None:
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


def test_gradients_of_the_whole_model() -> None:
    model = random_model(tiny_config()).double()
    tokens, positions = row(40)
    mode = Mode("dense")

    def loss() -> torch.Tensor:
        outputs = model(tokens, positions, mode)
        assert outputs.mtp_hidden is not None
        return outputs.hidden.sin().mean() + outputs.mtp_hidden.sin().mean()

    loss().backward()
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert ".indexer." in name or name == "lm_head.weight"
            continue
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / parameter.numel() ** 0.5
        step, before = 1e-6, parameter.data.clone()
        with torch.no_grad():
            parameter.data = before + step * direction
            up = loss()
            parameter.data = before - step * direction
            down = loss()
            parameter.data = before
        expected = ((up - down) / (2 * step)).item()
        assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=1e-4, abs=1e-8), name


def test_the_mtp_module_sees_the_next_token_and_the_normed_hidden_state() -> None:
    model = random_model(tiny_config())
    tokens, positions = row(30)
    changed = tokens.clone()
    changed[0, 20] = (tokens[0, 20] + 1) % TINY["vocab_size"]
    with torch.no_grad():
        outputs, others = (model(t, positions, Mode()) for t in (tokens, changed))
        assert outputs.mtp_hidden is not None and others.mtp_hidden is not None
        assert outputs.mtp_hidden.shape == (1, 29, TINY["hidden_size"])
        # Row i knows tokens up to i + 1 and nothing later.
        assert torch.allclose(outputs.mtp_hidden[:, :19], others.mtp_hidden[:, :19])
        assert not torch.allclose(outputs.mtp_hidden[:, 19], others.mtp_hidden[:, 19])
        module = model.model.layers[-1]
        assert isinstance(module, MTPLayer)
        # By hand, for the first row, whose attention is its own value.
        embedding = model.model.embed_tokens(tokens[:, 1:2])
        joined = torch.cat((module.enorm(embedding), module.hnorm(outputs.hidden[:, :1])), dim=-1)
        x = module.eh_proj(joined)
        cos = torch.ones(1, 1, 1, TINY["qk_rope_head_dim"] // 2)
        x = module(x, Extra(cos, torch.zeros_like(cos), Mode()))
        assert torch.allclose(module.shared_head["norm"](x), outputs.mtp_hidden[:, :1], atol=1e-5)


def test_the_router_chooses_by_bias_and_balances() -> None:
    raw = tiny_config()
    gate = Gate(ModelConfig.from_dict(raw))
    torch.nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(5))
    x = torch.randn(400, TINY["hidden_size"], generator=torch.Generator().manual_seed(6)) + 0.5
    first = 0.0
    for _ in range(200):
        gate(x)
        imbalance = gate.balance(0.01)
        first = first or imbalance
    assert imbalance < 1.3 < first
    experts, weights = gate(x)
    scores = torch.sigmoid(x @ gate.weight.T).gather(1, experts)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True))  # the bias is not in the weights


def test_the_layout_is_complete(tmp_path: Path) -> None:
    raw = model_config() | {k: v for k, v in TINY.items() if k != "torch_dtype"}
    model = random_model(raw)
    written = write_checkpoint(model, raw, tmp_path / "fp8", {"README.md": "x"})
    assert written.tensors > 100 and (tmp_path / "fp8" / "README.md").read_text() == "x"
    llm = LLM(tmp_path / "fp8", device="cpu", max_model_len=256, cache_memory="16MiB", progress=False)
    tokens, positions = row(100)
    with torch.no_grad():
        logits = model.lm_head(model(tokens, positions, Mode("sparse", 24)).hidden)[0]
    engine = llm.prompt_logits(tokens[0].tolist())
    assert 1e-5 < (logits - engine).norm() / engine.norm() < 0.3  # three bits of mantissa
