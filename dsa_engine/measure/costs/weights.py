"""Bytes of a rank's weights, by layer and by the stage that reads them: those of the model's own tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dsa_engine.model.decoder_layer import DecoderLayer
from dsa_engine.model.layers import Float32OutputLinear
from dsa_engine.model.model import Model
from dsa_engine.model.mtp import MTPModule

Kind = tuple[str, str]  # a layer's entries of mlp_layer_types and indexer_types


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one rank's weights.

    Attributes:
        layers: bytes by stage for each kind of layer; "MoE experts" counts one expert, "index keys" the part
            of the indexer's prolog that makes index keys.
        module: bytes of an MTP module outside its layer (its projection and norms); 0 without one.
        head: bytes of the LM head and the norm before it.
        embedding: bytes of the table, which takes memory and is not read as a whole.
        held: number of routed experts of the rank.
    """

    layers: dict[Kind, dict[str, float]]
    module: float
    head: float
    embedding: float
    held: int

    @classmethod
    def of(cls, model: Model) -> WeightBytes:
        """The bytes of a model that is loaded, or built on the meta device."""
        modules = [module for module in model.mtp if isinstance(module, MTPModule)]
        kinds: dict[Kind, dict[str, float]] = {}
        held = 0
        for layer in [*model.layers, *(module.layer for module in modules)]:
            assert isinstance(layer, DecoderLayer)
            config, number = layer.attention.config, layer.attention.layer
            kind = (config.mlp_layer_types[number], config.indexer_types[number])
            if kind not in kinds:
                kinds[kind] = _of_layer(layer)
            held = max(held, layer.moe.experts.count if layer.moe else 0)
        own = [(m.projection, m.embedding_norm, m.hidden_norm, m.norm) for m in modules[:1]]
        return cls(
            kinds, sum(map(_bytes, own)), _bytes((model.lm_head, model.norm)), _bytes((model.embed,)), held
        )  # fmt: skip


def _of_layer(layer: DecoderLayer) -> dict[str, float]:
    attention, indexer, moe = layer.attention, layer.attention.indexer, layer.moe
    stages = {
        "MLA prolog": _bytes((layer.input_norm, attention.q_a_norm, attention.kv_a_norm, attention.w_uk))
        + _bytes((*attention.q_a.tensors, *attention.q_b.tensors, *attention.kv_a.tensors)),
        "MLA epilog": _bytes((attention.w_uv, *attention.o.tensors, layer.post_attention_norm)),
    }
    if indexer is not None:
        keys = _bytes((*indexer.wk.tensors, indexer.k_norm_weight, indexer.k_norm_bias))
        stages["index keys"] = keys
        stages["indexer prolog"] = keys + _bytes(indexer.wq_b.tensors) + _float32_linear(indexer.weights_proj)
    if moe is not None:
        stages["MoE gate"] = _float32_linear(moe.gate) + _bytes((moe.bias,))
        stages["MoE experts"] = _bytes(moe.experts.tensors) / moe.experts.count
        assert moe.shared is not None
        stages["MoE shared"] = _bytes((*moe.shared.gate_up.tensors, *moe.shared.down.tensors))
    if layer.mlp is not None:
        stages["dense MLP"] = _bytes((*layer.mlp.gate_up.tensors, *layer.mlp.down.tensors))
    return stages


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


def _float32_linear(linear: Float32OutputLinear) -> float:
    """A float32 layer on the meta device, in the dtype in which a GPU keeps weights that checkpoints hold in
    bfloat16."""
    matrix = linear.matrix
    return float(matrix.numel() * linear.runtime.dtype.itemsize if matrix.is_meta else matrix.nbytes)
