"""Checkpoints with MTP modules, and their drafts by the paper's equations, in float64 with layers of ``transformers``.
Engines of released models with few layers, on a fake device."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine.config.released import released_config
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.startup.start import start
from dsa_engine.options import EngineOptions
from fake_cuda import FakeConfig, FakeDevice

LAYERS = {"num_hidden_layers": 3, "first_k_dense_replace": 1}  # one dense layer, two with experts

# Options that an engine would choose.
GIVEN: dict[str, Any] = {
    "kv_cache_dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 8192, "enable_dbo": False,
}  # fmt: skip


@pytest.fixture
def fake_engine(tmp_path: Path) -> Callable[..., Engine]:
    """``fake_engine(device, model, world, parallel={}, **options)``: rank 0 of ``world``, within ``with device``. It
    chooses options that are left out if ``optimize`` is given."""

    def make(
        device: FakeDevice, model: str, world: int, parallel: dict[str, Any] | None = None, **options: Any
    ) -> Engine:
        (tmp_path / "config.json").write_text(json.dumps(released_config(model)))
        fixed: dict[str, Any] = {"device": "cuda", "kernels": "triton", "load_format": "dummy", "progress": False}
        fixed |= {"hf_overrides": LAYERS, "cache_memory": "16GiB", "cudagraph_capture_sizes": []}
        chooses = "optimize" in options
        fixed |= {} if chooses else GIVEN
        divided = {} if chooses else {"cp_size": world, "tp_size": 1, "moe_dispatch": "all_to_all"}
        ranks = FakeConfig(device=device, world=world, **divided | (parallel or {}))
        return start(tmp_path, EngineOptions(tmp_path, parallel=ranks, **fixed | options))[0]

    return make


@pytest.fixture
def threads_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads run when they are joined."""

    class Thread:
        def __init__(self, target: Callable[[], None], **_: Any):
            self.join = target

        def start(self) -> None: ...

    monkeypatch.setattr(threading, "Thread", Thread)


@dataclass
class DraftingOracle:
    """A model and its MTP modules (DeepSeek-V3 report, equations 21 to 25), in float64, without caches.

    ``model`` is the main model; ``modules`` are models of one layer, each module's own decoder layer, whose final norm
    is the module's. Embedding and head are the main model's, unless ``weights`` has others.
    """

    folder: Path
    model: Any
    modules: list[Any]
    weights: list[
        dict[str, torch.Tensor]
    ]  # for each module: enorm, hnorm, eh_proj; embed_tokens and head if they are not the model's
    eps: float

    @torch.no_grad()
    def drafts(
        self,
        tokens: list[int],
        count: int,
        choose: Callable[[torch.Tensor, list[int]], int] = lambda logits, _: int(logits.argmax()),
    ) -> torch.Tensor:
        """Logits ``[count, vocab]`` of the drafts for ``tokens``, whose module rows begin at position 0. ``choose`` is
        called with those of a draft and all tokens before it, and returns the draft.

        The model has chosen ``tokens[-1]`` after ``tokens[:-1]``; the first draft is the next token. With one module,
        each later row is drafted from the module's own state and its last draft; with several, by the next one, whose
        rows embed the tokens one further, drafts where there are no others.
        """
        hidden = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        drafts_by = self._chain if len(self.modules) == 1 else self._each
        return drafts_by([*tokens], hidden, count, choose)

    def _chain(self, tokens: list[int], hidden: torch.Tensor, count: int, choose: Any) -> torch.Tensor:
        rows = self._rows(0, tokens[1:], hidden[:-1])
        logits, first, selected = [], len(rows), list[torch.Tensor]()

        def reuse(_: Any, __: Any, topk: torch.Tensor) -> torch.Tensor:  # [1, rows, selected]
            selected.append(topk[:, -1:])  # the first of these counts; an entry that is there twice counts once
            again = selected[0][..., torch.arange(topk.shape[-1]) % selected[0].shape[-1]]
            return torch.cat((topk[:, :first], again.expand(-1, topk.shape[1] - first, -1)), dim=1)

        attention = self.modules[0].model.layers[0].self_attn
        hooks = []
        if getattr(self.model.config, "index_share_for_mtp_iteration", False):
            hooks = [attention.indexer.register_forward_hook(reuse)]
        for _ in range(count):
            out = self._run(0, rows)[-1:]
            logits.append(self._logits(0, out)[0])
            tokens.append(choose(logits[-1], tokens))
            rows = torch.cat((rows, self._rows(0, tokens[-1:], out)))
        for hook in hooks:
            hook.remove()
        return torch.stack(logits)

    def _each(self, tokens: list[int], hidden: torch.Tensor, count: int, choose: Any) -> torch.Tensor:
        """Equation 21 for h of module k - 1 and the embeddings of tokens k further, 22 and 23 for each module."""
        states, logits = hidden[:-1], []
        for k in range(1, count + 1):
            states = self._run(k - 1, self._rows(k - 1, tokens[k : k + len(states)], states))
            logits.append(self._logits(k - 1, states[-1:])[0])
            tokens.append(choose(logits[-1], tokens))
        return torch.stack(logits)

    def _run(self, module: int, rows: torch.Tensor) -> torch.Tensor:
        return self.modules[module].model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]

    def _logits(self, module: int, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weights[module].get("head", self.model.lm_head.weight).T

    def _rows(self, module: int, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        weights = self.weights[module]
        embedded = weights.get("embed_tokens", self.model.model.embed_tokens.weight)[torch.tensor(tokens)]
        joined = (self._norm(embedded, weights["enorm"]), self._norm(hidden, weights["hnorm"]))
        return torch.cat(joined, dim=-1) @ weights["eh_proj"].T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt() * weight


@pytest.fixture(scope="session")
def drafting_oracle(oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``drafting_oracle(model_type, layers=2, modules=1, own_tables=False, **overrides)``: a random model of so many
    layers and MTP modules.

    The modules' decoder layers are further layers of a model of ``transformers``. With ``own_tables`` their embedding
    and head are not the model's.
    """
    made: dict[str, DraftingOracle] = {}

    def get(
        model_type: str, layers: int = 2, modules: int = 1, own_tables: bool = False, **overrides: Any
    ) -> DraftingOracle:
        key = repr((model_type, layers, modules, own_tables, sorted(overrides.items())))
        if key not in made:
            whole = oracle(model_type, num_hidden_layers=layers + modules, **overrides)
            made[key] = split_off_modules(whole, layers, modules, own_tables, tmp_path_factory.mktemp("mtp"))
        return made[key]

    return get


def split_off_modules(whole: Any, layers: int, count: int, own_tables: bool, folder: Path) -> DraftingOracle:
    """The last layers of a model become the MTP modules' decoder layers, in the file and in the oracle."""
    raw = json.loads((whole.folder / "config.json").read_text())
    hidden, eps = raw["hidden_size"], raw["rms_norm_eps"]
    for key in ("mlp_layer_types", "indexer_types", "layer_types"):
        if isinstance(raw.get(key), list):
            raw[key] = raw[key][:layers]
    raw |= {"num_hidden_layers": layers, "num_nextn_predict_layers": count}
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(whole.folder / "model.safetensors")
    whole_model = copy.deepcopy(whole.model).double()
    modules, all_weights = [], []
    for number in range(layers, layers + count):
        weights = {
            "enorm": 1 + 0.1 * torch.randn(hidden, generator=generator),
            "hnorm": 1 + 0.1 * torch.randn(hidden, generator=generator),
            "eh_proj": torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5,
        }
        norm = 1 + 0.1 * torch.randn(hidden, generator=generator)
        prefix = f"model.layers.{number}."
        tensors |= {f"{prefix}{name}.weight": value for name, value in weights.items()}
        head, embedding = tensors["lm_head.weight"].clone(), tensors["model.embed_tokens.weight"].clone()
        if own_tables:
            weights["head"] = head.normal_(std=hidden**-0.5, generator=generator)
            weights["embed_tokens"] = embedding.normal_(generator=generator)
        tensors |= {
            prefix + "shared_head.norm.weight": norm,
            prefix + "shared_head.head.weight": head,
            prefix + "embed_tokens.weight": embedding,
        }
        module = only_layers(whole_model, range(number, number + 1))
        module.model.norm.weight = torch.nn.Parameter(norm.double(), requires_grad=False)
        modules.append(module)
        all_weights.append({name: value.double() for name, value in weights.items()})
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return DraftingOracle(folder, only_layers(whole_model, range(layers)), modules, all_weights, eps)


def only_layers(whole: Any, layers: range) -> Any:
    """A model of some layers of another, with its embedding and head."""
    model = copy.deepcopy(whole)
    model.model.layers = model.model.layers[layers.start : layers.stop]
    model.config.num_hidden_layers = len(layers)
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    return model
