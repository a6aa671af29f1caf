"""The largest magnitudes of the inputs of every linear layer on a text, the statistics for SmoothQuant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.llm import LLM
from dsa_engine.model.model import Model
from dsa_engine.model.moe import MoE
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.weights.formats import Linear
from dsa_engine.weights.formats.unquantized import UnquantizedExperts

Largest = dict[str, torch.Tensor]


class _WatchedLinear(Linear):
    """Wraps a layer and records the largest magnitude of each input channel, for each of its matrices."""

    def __init__(self, inner: Linear, largest: Largest):
        self._inner, self._largest = inner, largest
        self.tensors, self.sources, self.rows = inner.tensors, inner.sources, inner.rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for source in self.sources:
            _record(self._largest, source.name, x.flatten(0, -2))
        return self._inner(x)

    def dequantized(self) -> torch.Tensor:
        return self._inner.dequantized()


class _WatchedExperts:
    """The same for experts: the inputs of the gate, up and down projections of each."""

    def __init__(self, inner: UnquantizedExperts, largest: Largest):
        self._inner, self._largest, self.product = inner, largest, inner.product
        self._prefixes = [source.name.removesuffix(".down_proj.weight") for source in inner.sources[2::3]]

    def __call__(self, received: Received, uncounted_bytes: int) -> torch.Tensor:
        for number, prefix in enumerate(self._prefixes):
            rows = received.tokens[(received.topk_ids == number).any(dim=1)]
            gate, up = F.linear(rows, self._inner.gate_up[0][number]).chunk(2, dim=-1)
            for name, x in (("gate_proj", rows), ("up_proj", rows), ("down_proj", F.silu(gate) * up)):
                _record(self._largest, f"{prefix}.{name}.weight", x)
        return self._inner(received, uncounted_bytes)


def _record(largest: Largest, name: str, x: torch.Tensor) -> None:
    if x.shape[0]:
        maximum = x.abs().amax(dim=0).float().cpu()
        largest[name] = torch.maximum(largest[name], maximum) if name in largest else maximum


@contextmanager
def watched(model: Model) -> Iterator[Largest]:
    """Records the inputs of the model's linear layers and experts inside the block.

    Yields the largest magnitude of each input channel so far, float32 ``[in]``, by the weight's name in the checkpoint.
    Experts without tokens have no entry.
    """
    largest: Largest = {}
    before: list[tuple[torch.nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Linear):
                before.append((module, name, value))
                setattr(module, name, _WatchedLinear(value, largest))
            elif isinstance(value, UnquantizedExperts):
                before.append((module, name, value))
                setattr(module, name, _WatchedExperts(value, largest))
    try:
        yield largest
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def calibrate(llm: LLM, text: str, tokens: int, window: int = 2048) -> Largest:
    """Runs a model over the first ``tokens`` of a text like those of its use, ``window`` at a time; returns what
    :func:`watched` yields. Weights must be plain numbers, or expanded (``quantization="dequantize"``)."""
    if llm.engine.mesh.world_size > 1:
        raise ValueError("calibration runs in one process; start it without torchrun")
    moes = [layer.experts for layer in llm.engine.model.modules() if isinstance(layer, MoE)]
    if not all(isinstance(experts, UnquantizedExperts) for experts in moes):
        raise ValueError("calibration needs a model in plain numbers: load it with quantization='dequantize'")
    ids = llm.tokenizer.encode(text)[:tokens]
    if not ids:
        raise ValueError("the calibration text is empty")
    window = min(window, llm.engine.max_model_len)
    with watched(llm.engine.model) as largest:
        for first in range(0, len(ids), window):
            prefill(llm.engine, ids[first : first + window])
    return largest
