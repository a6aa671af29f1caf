"""One way to use some ranks for prefill or decode: its counted work, and its memory on a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from dsa_engine.commands.planner.devices import Device
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.config.released import released_fp8
from dsa_engine.convert.schemes import stored_as
from dsa_engine.engine.startup.kernel_check import layers_of_each_kind
from dsa_engine.engine.startup.memory import activation_bytes
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.model_costs import ModelCosts, formats_of
from dsa_engine.measure.costs.weights import WeightBytes
from dsa_engine.measure.weight_memory import rank_model
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.options import EngineOptions
from dsa_engine.parallel.experts.traffic import Routing, RowBytes, quantized_bytes
from dsa_engine.parallel.links import Links

WORKSPACE = 1 << 30
UTILIZATION = EngineOptions.gpu_memory_utilization  # fraction of a device's memory, as the engine takes it
_LINKED = (0.8, 0.9)  # usable fraction of nominal rates: inside a node, between nodes (parallel/links.py)


@dataclass(frozen=True)
class Deployment:
    """The way in which some ranks run the model.

    Attributes:
        ranks: number of ranks over which the experts are divided.
        cp_size: number of ranks that prefill a prompt together.
        tp_size: number of neighbouring ranks over which embedding, o_proj and LM head are cut.
        chunk: maximum number of tokens of a rank in a prefill step.
        weights: one of ``WEIGHTS``.
        cache: one of ``CACHES``.
        drafts: number of drafts in a decode step.
    """

    ranks: int
    cp_size: int = 1
    tp_size: int = 1
    chunk: int = 8192
    weights: str = "fp8"
    cache: str = "bfloat16"
    drafts: int = 0


class Placed:
    """A deployment of a model on a device.

    Raises:
        ValueError: sizes that do not divide, or formats that the model or the device does not have.
    """

    def __init__(self, config: ModelConfig, device: Device, how: Deployment):
        self.config, self.device, self.how = config, device, how
        self.nodes = cdiv(how.ranks, device.node_size)
        self.links = links_of(device)
        self.cache = _cache_format(config, how.cache)
        narrow = how.weights in device.narrow
        self.costs = _costs(config, how.weights, how.cache, narrow, how.ranks, how.tp_size)
        hidden = config.hidden_size
        sent = quantized_bytes(hidden) if narrow and how.weights == "fp8" else 2 * hidden
        self.row = RowBytes.of(sent, config.num_experts_per_tok, 2 * hidden)
        self.routing = Routing(config.n_routed_experts, config.num_experts_per_tok, config.n_group, config.topk_group)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights on the rank with the most experts."""
        c, w, drafts = self.config, self.costs.weights, bool(self.how.drafts)
        held = w.embedding + w.head + w.module * drafts
        layers = c.with_mtp(1) if drafts else c
        for kind in zip(layers.mlp_layer_types, layers.indexer_types, strict=True):
            stages = w.layers[kind]
            held += sum(size for name, size in stages.items() if name not in ("index keys", "MoE experts"))
            held += stages.get("MoE experts", 0.0) * w.held
        return held

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in the caches."""
        config = self.config.with_mtp(1) if self.how.drafts else self.config
        return cache_bytes_per_token(config, self.cache)

    def cache_room(self, rows: int, dispatch: str = "all_gather") -> float:
        """Bytes that remain for caches on a rank with ``rows`` rows in a step; negative if the rest does not fit."""
        meeting = rows * (self.how.ranks if dispatch == "all_gather" else min(self.how.ranks, 2))
        used = self.weight_bytes + WORKSPACE + activation_bytes(self.config, rows, meeting, torch.bfloat16)
        return UTILIZATION * self.device.memory - used

    def collectives(self, rows: float, gathered_rows: float, logits: float) -> tuple[float, float]:
        """Seconds of the collectives of one pass that are not of the experts: the gathers of cache rows, and those of
        tensor parallelism.

        Args:
            rows: rows of a rank.
            gathered_rows: rows of a rank whose cache rows the cp group gathers; 0 in decode.
            logits: rows of a rank whose logits are computed.
        """
        c, cp, tp = self.config, self.how.cp_size, self.how.tp_size
        layers, links, nodes = c.num_hidden_layers, self.links, math.ceil(tp / self.device.node_size)
        packed = gathered_rows * self.cache.packed_width() * self.cache.latent.pool_dtype.itemsize
        gathers = layers * links.ring(cp, cdiv(cp, self.device.node_size), packed) if gathered_rows else 0.0
        if tp == 1:
            return gathers, 0.0
        heads = links.all_to_all(tp, nodes, 2 * rows * c.num_attention_heads * c.v_head_dim / tp)
        back = links.ring(tp, nodes, 2 * rows * c.hidden_size)
        return gathers, layers * (heads + back) + back + links.all_to_all(tp, nodes, 4 * logits * c.vocab_size / tp)


@lru_cache(maxsize=4096)
def _costs(config: ModelConfig, weights: str, cache: str, narrow: bool, ranks: int, tp_size: int) -> ModelCosts:
    """Costs of the rank with the most experts."""
    held = replace(_weights_of_one(config, weights, tp_size), held=cdiv(config.n_routed_experts, ranks))
    formats = formats_of(config, _cache_format(config, cache), 2, stored(weights, _one_of_each(config)))
    formats = formats._replace(
        narrow_linear=formats.narrow_linear and narrow, narrow_experts=formats.narrow_experts and narrow
    )
    return ModelCosts(config, held, formats)


@lru_cache(maxsize=64)
def _cache_format(config: ModelConfig, cache: str) -> CacheFormat:
    return cache_format(config, torch.float8_e4m3fn if cache == "fp8" else torch.bfloat16)


@lru_cache(maxsize=64)
def stored(weights: str, config: ModelConfig) -> QuantizationConfig | None:
    """The stored format of the weights of such a checkpoint."""
    if weights == "bfloat16":
        return None
    if weights == "fp8":
        return config.quantization if config.weight_block_size else released_fp8()
    return stored_as(weights, config)


@lru_cache(maxsize=8)
def links_of(device: Device) -> Links:
    """The device's links, with the latencies of `parallel/links.py`."""
    known = Links()
    inside = replace(known.inside, bandwidth_gb_s=device.inside * _LINKED[0] / 1e9)
    between = replace(known.between, bandwidth_gb_s=device.between * _LINKED[1] / 1e9)
    return Links(known.start_us, inside, between)


@lru_cache(maxsize=64)
def _weights_of_one(config: ModelConfig, weights: str, tp_size: int) -> WeightBytes:
    """Bytes of a rank with one expert, and of an MTP module if the model has one: all experts have the same size."""
    few, ranks = _one_of_each(config), config.n_routed_experts // tp_size * tp_size
    modules = min(1, config.num_nextn_predict_layers)
    return WeightBytes.of(rank_model(few, stored(weights, few), torch.bfloat16, ranks, tp_size, modules))


@lru_cache(maxsize=64)
def _one_of_each(config: ModelConfig) -> ModelConfig:
    """The model with one layer of each kind."""
    count = max(layers_of_each_kind(config)) + 1
    return replace(
        config,
        num_hidden_layers=count,
        mlp_layer_types=config.mlp_layer_types[:count],
        indexer_types=config.indexer_types[:count],
    )
