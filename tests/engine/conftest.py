"""Checkpoints with an MTP module, and what it drafts by the paper's equations: float64, layers of ``transformers``.
Engines of released models, few layers deep, on a device that is not there."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine.checkpoint import released_config
from dsa_engine.engine.engine import Engine
from dsa_engine.measure.fake_cuda import FakeConfig, FakeDevice
from dsa_engine.options import EngineOptions

LAYERS = {"num_hidden_layers": 3, "first_k_dense_replace": 1}  # one dense layer, two with experts


@pytest.fixture
def fake_engine(tmp_path: Path) -> Callable[..., Engine]:
    """``fake_engine(device, model, world, parallel={}, **options)``: rank 0 of ``world``, within ``with device``."""

    def make(
        device: FakeDevice, model: str, world: int, parallel: dict[str, Any] | None = None, **options: Any
    ) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(released_config(model)))
        fixed: dict[str, Any] = {"device": "cuda", "kernels": "triton", "load_format": "dummy", "progress": False}
        ranks = FakeConfig(device=device, world=world, **parallel or {})
        return Engine(tmp_path, EngineOptions(tmp_path, hf_overrides=LAYERS, parallel=ranks, **fixed | options))

    return make


@dataclass
class DraftingOracle:
    """A model and its MTP module (DeepSeek-V3 report, equations 21 to 23), in float64, without caches.

    ``model`` is the main model; ``module`` a model of one layer, the module's own decoder layer, whose final norm is
    the module's; the head is the main model's.
    """

    folder: Path
    model: Any
    module: Any
    weights: dict[str, torch.Tensor]  # enorm, hnorm, eh_proj
    eps: float

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> torch.Tensor:
        """Logits ``[count, vocab]`` of the tokens behind the one after ``tokens``, whose module rows begin at 0.

        The token after ``tokens[:-1]`` is ``tokens[-1]``; the first row is of the draft behind it. Each later row is
        drafted from the module's own state and its last draft.
        """
        hidden = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        rows = self._row(tokens[1:], hidden[:-1])
        logits = []
        for _ in range(count):
            out = self.module.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, -1:]
            logits.append(self.model.lm_head(out)[0])
            rows = torch.cat((rows, self._row([int(logits[-1].argmax())], out)))
        return torch.stack(logits)

    def _row(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        joined = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), dim=-1)
        return joined @ self.weights["eh_proj"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt() * self.weights[name]


@pytest.fixture(scope="session")
def drafting_oracle(oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``drafting_oracle(model_type, layers=2, **overrides)``: a random model of so many layers and one MTP module.

    The module's decoder layer is one more layer of a model of ``transformers``.
    """
    made: dict[str, DraftingOracle] = {}

    def get(model_type: str, layers: int = 2, **overrides: Any) -> DraftingOracle:
        key = repr((model_type, layers, sorted(overrides.items())))
        if key not in made:
            whole = oracle(model_type, num_hidden_layers=layers + 1, **overrides)
            made[key] = split_off_module(whole, layers, tmp_path_factory.mktemp("mtp"))
        return made[key]

    return get


def split_off_module(whole: Any, layers: int, folder: Path) -> DraftingOracle:
    """The last layer of a model becomes the MTP module's decoder layer, in the file and in the oracle."""
    raw = json.loads((whole.folder / "config.json").read_text())
    hidden, eps = raw["hidden_size"], raw["rms_norm_eps"]
    for key in ("mlp_layer_types", "indexer_types", "layer_types"):
        if isinstance(raw.get(key), list):
            raw[key] = raw[key][:layers]
    raw |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    generator = torch.Generator().manual_seed(5)
    weights = {
        "enorm": 1 + 0.1 * torch.randn(hidden, generator=generator),
        "hnorm": 1 + 0.1 * torch.randn(hidden, generator=generator),
        "eh_proj": torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5,
    }
    norm = 1 + 0.1 * torch.randn(hidden, generator=generator)
    tensors = load_file(whole.folder / "model.safetensors")
    prefix = f"model.layers.{layers}."
    tensors |= {f"{prefix}{name}.weight": value for name, value in weights.items()}
    tensors |= {
        prefix + "shared_head.norm.weight": norm,
        prefix + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    model = copy.deepcopy(whole.model).double()
    module = copy.deepcopy(model)
    module.model.layers = model.model.layers[layers:]
    model.model.layers = model.model.layers[:layers]
    with torch.no_grad():
        module.model.norm.weight.copy_(norm)
    for one, depth in ((model, layers), (module, 1)):
        one.config.num_hidden_layers = depth
        one.config._experts_implementation = "eager"  # the grouped product has no float64
    return DraftingOracle(folder, model, module, {name: value.double() for name, value in weights.items()}, eps)
