"""Layers multiply by weights of any format: one of a test, through a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.weights.formats import Linear, Matrix, Unquantized, choose
from dsa_engine.weights.formats.unquantized import UnquantizedExperts


class TransposedLinear(Linear):
    """Stored as ``[in, out]``: another layout, so a plain weight is a copy and must be made after loading."""

    asked = 0

    def __init__(self, parts: Sequence[Matrix]):
        self.rows = [part.shape[0] for part in parts]
        self.stored = torch.full((parts[0].shape[1], sum(self.rows)), float("nan"))
        self.tensors = (self.stored,)
        into = self.stored.split(self.rows, dim=1)
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
