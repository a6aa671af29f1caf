"""Layers multiply by weights of any format: the unquantised one is checked alone, another one through a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dsa_engine import LLM, SamplingParams
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.weights import Source
from dsa_engine.weights.formats import Linear, Matrix, Unquantized, choose
from dsa_engine.weights.formats.unquantized import UnquantizedExperts

CPU = torch.device("cpu")


def fill(sources: list[Source], stored: dict[str, torch.Tensor]) -> None:
    """As a reader does."""
    for source in sources:
        tensor = stored[source.name]
        assert tensor.shape == source.shape
        where = tuple(slice(s, s + n) for s, n in zip(source.start, source.into.shape, strict=True))
        source.into.copy_(tensor[where])


def test_a_linear_layer() -> None:
    weight, x = torch.randn(6, 8), torch.randn(3, 8)
    linear = Unquantized(torch.float32, CPU).linear(Matrix("w", 6, 8))
    fill(linear.sources, {"w": weight})
    torch.testing.assert_close(linear(x), x @ weight.t())
    assert torch.equal(linear.dequantized(), weight)
    assert linear.dequantized() is linear.tensors[0]  # no copy
    assert [tensor.nbytes for tensor in linear.tensors] == [4 * 6 * 8]


def test_a_rank_keeps_a_part() -> None:
    weight, x = torch.randn(6, 8), torch.randn(3, 2)
    linear = Unquantized(torch.float32, CPU).linear(Matrix("w", 6, 8, kept_rows=(1, 5), kept_columns=(4, 6)))
    fill(linear.sources, {"w": weight})
    torch.testing.assert_close(linear(x), x @ weight[1:5, 4:6].t())


def test_matrices_are_stacked_in_order() -> None:
    stored, x = {"q": torch.randn(6, 8), "kv": torch.randn(3, 8)}, torch.randn(2, 8)
    linear = Unquantized(torch.float32, CPU).linear(Matrix("q", 6, 8, kept_rows=(2, 6)), Matrix("kv", 3, 8))
    assert [source.name for source in linear.sources] == ["q", "kv"]
    fill(linear.sources, stored)
    torch.testing.assert_close(linear(x), x @ torch.cat((stored["q"][2:], stored["kv"])).t())


def test_experts() -> None:
    stored = {
        f"layer.{e}.{name}_proj.weight": torch.randn(*((8, 6) if name == "down" else (6, 8)))
        for e in range(4)
        for name in ("gate", "up", "down")
    }
    experts = Unquantized(torch.float32, CPU).experts([f"layer.{e}" for e in (2, 0)], 8, 6)
    assert experts.count == 2
    assert [s.name.removeprefix("layer.") for s in experts.sources] == [
        f"{e}.{name}_proj.weight" for e in (2, 0) for name in ("gate", "up", "down")
    ]
    fill(experts.sources, stored)
    x, weights = torch.randn(5, 8), torch.rand(5, 2)
    chosen = torch.tensor([[0, 1], [1, -1], [-1, -1], [1, 0], [0, -1]], dtype=torch.int32)
    out = experts(Received(x, chosen, weights, 1.0), 0)
    wanted = torch.zeros(5, 8)
    for t in range(5):
        for j in range(2):
            if chosen[t, j] >= 0:
                gate, up, down = (
                    stored[f"layer.{(2, 0)[chosen[t, j]]}.{n}_proj.weight"] for n in ("gate", "up", "down")
                )
                wanted[t] += weights[t, j] * (F.silu(x[t] @ gate.t()) * (x[t] @ up.t()) @ down.t())
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


class TransposedLinear(Linear):
    """Stored as ``[in, out]``: another layout, so a plain weight is a copy and must be made after loading."""

    asked = 0

    def __init__(self, parts: Sequence[Matrix]):
        rows = [part.shape[0] for part in parts]
        self.stored = torch.full((parts[0].shape[1], sum(rows)), float("nan"))
        self.tensors = (self.stored,)
        into = self.stored.split(rows, dim=1)
        self.sources = [part.source(piece.t()) for part, piece in zip(parts, into, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.stored

    def dequantized(self) -> torch.Tensor:
        TransposedLinear.asked += 1
        return self.stored.t().contiguous()


class CountedExperts(UnquantizedExperts):
    calls = 0

    def __call__(self, received: Received, uncounted_bytes: int) -> torch.Tensor:
        CountedExperts.calls += 1
        return super().__call__(received, uncounted_bytes)


class Transposed(Unquantized):
    def linear(self, *parts: Matrix) -> TransposedLinear:  # type: ignore[override]
        return TransposedLinear(parts)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> CountedExperts:
        return CountedExperts(prefixes, hidden, intermediate, self.dtype, self.device)


def test_no_layer_knows_how_weights_are_stored(demo_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights are of another format gives the same logits and tokens, and no layer was changed for it."""
    prompt = [(7 * i) % 300 for i in range(300)]  # selects: longer than the demo's index_topk

    def results() -> tuple[torch.Tensor, list[int], LLM]:
        llm = LLM("demo-random", device="cpu", max_model_len=512, progress=False)
        generated = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4))[0].token_ids
        return llm.prompt_logits(prompt), list(generated), llm

    logits, tokens, plain = results()
    monkeypatch.setattr(choose, "Unquantized", Transposed)
    other_logits, other_tokens, other = results()
    assert other_tokens == tokens
    assert float((other_logits - logits).norm() / logits.norm()) < 1e-3
    # What is asked for plain is W_UK and W_UV of every layer, once; what they were stored in is let go.
    assert TransposedLinear.asked == other.engine.config.num_hidden_layers
    assert CountedExperts.calls > 0
    held = [sum(p.nbytes for p in llm.engine.model.parameters()) for llm in (plain, other)]
    assert held[0] == held[1] == sum(source.into.nbytes for source in plain.engine.model.weight_sources())
    # Loaded in the same order, whatever the format.
    names = [[source.name for source in llm.engine.model.weight_sources()] for llm in (plain, other)]
    assert [name for name in names[0] if "kv_b_proj" not in name] == names[1]
