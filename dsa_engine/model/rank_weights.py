"""A rank's weights as the model's modules declare them: bytes in memory, and elements of the matrices that rows meet.

The modules are made on the meta device, without memory: formats, cuts and copies are those of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.layout import released_tensors
from dsa_engine.model.model import DecoderLayer, Model, MTPModule
from dsa_engine.model.runtime import Runtime
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.group import Group
from dsa_engine.weights.formats import quantization_name, weight_format

_META = torch.device("meta")
Kind = tuple[str, str]  # a layer's entries of mlp_layer_types and indexer_types


class LayerBytes(NamedTuple):
    rows: float  # everything that each row reads, which is all but:
    queries: float  # the indexer's queries, which only rows with selected tokens have
    expert: float  # one routed expert


class LayerMatrices(NamedTuple):
    """Elements of a layer's matrices, on all ranks of a tensor-parallel group together."""

    rows: int  # those that each row meets, which are all but:
    queries: int  # the indexer's queries, for rows with selected tokens
    up: int  # W_UK and W_UV, for absorbed rows and expanded keys
    expert: int  # one routed expert


# What each row does not meet, by the beginning of the name in a layer.
_PARTS = {
    "self_attn.indexer.wq_b.": "queries",
    "self_attn.indexer.weights_proj.": "queries",
    "self_attn.kv_b_proj.": "up",
    "mlp.experts.0.": "expert",
    "mlp.experts.": "other experts",
}


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one rank's weights."""

    layers: dict[Kind, LayerBytes]
    module: float  # an MTP module outside its layer (its projection and norms); 0 without one
    head: float  # the LM head and the norm before it
    embedding: float  # the table, which takes memory and is not read as a whole
    held: int  # number of routed experts of the rank

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

    @classmethod
    def of_rank(
        cls,
        config: ModelConfig,
        stored: QuantizationConfig | None,
        dtype: torch.dtype,
        ranks: int,
        tp_size: int = 1,
    ) -> WeightBytes:
        """The bytes of the rank with the most routed experts, and of an MTP module if the model has one
        (:func:`rank_model` has the arguments)."""
        return replace(_of_one(config, stored, dtype, tp_size), held=cdiv(config.n_routed_experts, ranks))

    def total(self, config: ModelConfig, drafts: bool) -> float:
        """Bytes of all layers of ``config``, of embedding and head, and of an MTP module if it ``drafts``."""
        layers = config.with_mtp(1) if drafts else config
        parts = [self.layers[kind] for kind in _kinds(layers)]
        held = sum(one.rows + one.queries + one.expert * self.held for one in parts)
        return held + self.embedding + self.head + self.module * drafts

    def expert(self, config: ModelConfig) -> float:
        """Bytes of a routed expert in every layer of ``config``."""
        return sum(self.layers[kind].expert for kind in _kinds(config))


@lru_cache(maxsize=64)
def layer_matrices(config: ModelConfig) -> dict[Kind, LayerMatrices]:
    """The matrices of each kind of layer of a model and its MTP modules."""
    few = _one_of_each(config)
    kinds = _kinds(few.with_mtp(few.num_nextn_predict_layers))
    elements = {kind: dict.fromkeys((*LayerMatrices._fields, "other experts"), 0) for kind in kinds}
    first = {kinds.index(kind): elements[kind] for kind in elements}
    for spec in released_tensors(few, fp8=False):
        number, _, name = spec.name.removeprefix("model.layers.").partition(".")
        of_layer = name.startswith(("self_attn.", "mlp.")) and int(number) in first
        if of_layer and len(spec.shape) == 2:
            part = next((part for start, part in _PARTS.items() if name.startswith(start)), "rows")
            first[int(number)][part] += spec.numel
    return {kind: LayerMatrices(*(parts[name] for name in LayerMatrices._fields)) for kind, parts in elements.items()}


def layers_of_each_kind(config: ModelConfig) -> list[int]:
    """The first layer of every kind: dense or with experts, with an indexer or with another layer's selection."""
    kinds = _kinds(config)
    return sorted({0, *map(kinds.index, kinds)})  # the first layer selects for layers that do not


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
    """The model of the rank with the most routed experts, on the meta device; ``ValueError`` for sizes that do not
    divide, or a format that has no class.

    Args:
        stored: the weights' format in memory; None: all in ``dtype``, that of activations.
        ranks: number of ranks over which the experts are divided.
        mtp_modules: number of MTP modules that draft; their copies of embedding and head are not loaded.
    """
    with torch.inference_mode():
        made = weight_format(stored, quantization_name(stored), dtype, _META)
        mesh = _FirstRank(ParallelConfig(tp_size=tp_size), 0, ranks, _META)
        model = Model(config, Runtime(mesh, dtype, made, workspace=0), mtp_modules)
        model.weights_loaded()
    return model


class _FirstRank(Mesh):
    """The first of ranks that do not exist: groups have sizes and no communicators."""

    def _host_group(self) -> Group:
        return Group((0,), 0, None)

    def _part(self, parts: Sequence[Sequence[int]], communicator: int = 0) -> Group:
        return Group(tuple(parts[0]), 0, None)


@lru_cache(maxsize=64)
def _of_one(config: ModelConfig, stored: QuantizationConfig | None, dtype: torch.dtype, tp_size: int) -> WeightBytes:
    """Bytes of a rank with one expert: all experts have the same size."""
    ranks = config.n_routed_experts // tp_size * tp_size
    modules = min(1, config.num_nextn_predict_layers)
    return WeightBytes.of(rank_model(_one_of_each(config), stored, dtype, ranks, tp_size, modules))


def _one_of_each(config: ModelConfig) -> ModelConfig:
    count = max(layers_of_each_kind(config)) + 1
    mlp, indexer = config.mlp_layer_types[:count], config.indexer_types[:count]
    return replace(config, num_hidden_layers=count, mlp_layer_types=mlp, indexer_types=indexer)


def _kinds(config: ModelConfig) -> list[Kind]:
    return list(zip(config.mlp_layer_types, config.indexer_types, strict=True))


def _of_layer(layer: DecoderLayer) -> LayerBytes:
    indexer, moe = layer.attention.indexer, layer.moe
    queries = _bytes((*indexer.wq_b.tensors, indexer.weights_proj.matrix)) if indexer else 0.0
    experts = _bytes(moe.experts.tensors) if moe else 0.0
    rows = _bytes(layer.parameters()) - queries - experts
    return LayerBytes(rows, queries, experts / moe.experts.count if moe else 0.0)


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))
