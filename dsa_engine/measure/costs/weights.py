"""Bytes of a rank's weights, in all and by layer: those of the model's own tensors, which the meta device can hold
without memory: formats, cuts and copies as in a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.measure.emulation.config import EmulatedConfig, EmulatedMesh
from dsa_engine.model.model import DecoderLayer, Model, MTPModule
from dsa_engine.model.runtime import Runtime
from dsa_engine.weights.formats import quantization_name, weight_format

_META = torch.device("meta")
Kind = tuple[str, str]  # a layer's entries of mlp_layer_types and indexer_types


class LayerBytes(NamedTuple):
    rows: float  # everything that each row reads, which is all but:
    queries: float  # the indexer's queries, which only rows with selected tokens have
    expert: float  # one routed expert


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one rank's weights.

    Attributes:
        layers: bytes of each kind of layer.
        module: bytes of an MTP module outside its layer (its projection and norms); 0 without one.
        head: bytes of the LM head and the norm before it.
        embedding: bytes of the table, which takes memory and is not read as a whole.
        held: number of routed experts of the rank.
    """

    layers: dict[Kind, LayerBytes]
    module: float
    head: float
    embedding: float
    held: int

    @classmethod
    def of(cls, model: Model) -> WeightBytes:
        """The bytes of a model that is loaded, or built on the meta device."""
        modules = [module for module in model.mtp if isinstance(module, MTPModule)]
        kinds: dict[Kind, LayerBytes] = {}
        held = 0
        for layer in [*model.layers, *(module.layer for module in modules)]:
            assert isinstance(layer, DecoderLayer)
            config, number = layer.attention.config, layer.attention.layer
            kind = (config.mlp_layer_types[number], config.indexer_types[number])
            kinds.setdefault(kind, _of_layer(layer))
            held = max(held, layer.moe.experts.count if layer.moe else 0)
        own = sum(_bytes((m.projection, m.embedding_norm, m.hidden_norm, m.norm)) for m in modules[:1])
        return cls(kinds, own, _bytes((model.lm_head, model.norm)), _bytes((model.embed,)), held)

    def total(self, config: ModelConfig, drafts: bool) -> float:
        """Bytes of all layers of ``config``, of embedding and head, and of an MTP module if it ``drafts``."""
        layers = config.with_mtp(1) if drafts else config
        kinds = zip(layers.mlp_layer_types, layers.indexer_types, strict=True)
        held = sum(one.rows + one.queries + one.expert * self.held for one in map(self.layers.__getitem__, kinds))
        return held + self.embedding + self.head + self.module * drafts


def _of_layer(layer: DecoderLayer) -> LayerBytes:
    indexer, moe = layer.attention.indexer, layer.moe
    queries = _bytes((*indexer.wq_b.tensors, indexer.weights_proj.matrix)) if indexer else 0.0
    experts = _bytes(moe.experts.tensors) if moe else 0.0
    rows = _bytes(layer.parameters()) - queries - experts
    return LayerBytes(rows, queries, experts / moe.experts.count if moe else 0.0)


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


def weight_bytes(model: Model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def rank_model(
    config: ModelConfig,
    stored: QuantizationConfig | None,
    dtype: torch.dtype,
    ranks: int,
    tp_size: int = 1,
    mtp_modules: int = 0,
) -> Model:
    """The model of the rank with the most routed experts, on the meta device.

    Args:
        config: the model.
        stored: their format in memory; None: all in ``dtype``.
        dtype: dtype of activations and of weights that are not quantised.
        ranks: number of ranks over which the experts are divided.
        tp_size: number of neighbouring ranks over which embedding, output projections and LM head are cut.
        mtp_modules: number of MTP modules that draft; their copies of embedding and head are not loaded.

    Raises:
        ValueError: sizes that do not divide, or a format that has no class.
    """
    mesh = EmulatedMesh(EmulatedConfig(emulate_world=ranks, tp_size=tp_size), _META)
    with torch.inference_mode():
        made = weight_format(stored, quantization_name(stored), dtype, _META)
        model = Model(config, Runtime(mesh, dtype, made, workspace=0), mtp_modules)
        model.weights_loaded()
    return model
