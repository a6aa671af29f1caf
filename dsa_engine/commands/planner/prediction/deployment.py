"""One way to use some ranks for prefill or decode: its memory on a rank, and its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from dsa_engine.commands.planner.prediction.devices import Device
from dsa_engine.commands.planner.prediction.exchange import ExpertExchange, even_seconds
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
from dsa_engine.measure.costs.work import Stages, Work
from dsa_engine.measure.weight_memory import rank_model
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.options import EngineOptions
from dsa_engine.parallel.collective_log import Kind
from dsa_engine.parallel.links import Links

WORKSPACE = 1 << 30
UTILIZATION = EngineOptions.gpu_memory_utilization  # fraction of a device's memory, as the engine takes it
_LINKED = (0.8, 0.9)  # usable fraction of nominal rates: inside a machine, between machines (parallel/links.py)


@dataclass(frozen=True)
class Deployment:
    """The way in which some ranks run the model.

    Attributes:
        ranks: number of ranks over which the experts are divided.
        cp_size: number of ranks that prefill a prompt together.
        tp_size: number of neighbouring ranks over which embedding, o_proj and LM head are cut.
        dispatch: how tokens reach experts: one of ``DISPATCHES``, or "auto": the one with the shortest exchange.
        chunk: maximum number of tokens of a rank in a prefill step.
        weights: one of ``WEIGHTS``.
        cache: one of ``CACHES``.
        drafts: number of drafts in a decode step.
        balanced: experts have equal loads in every step, as with perfect replicas; else tokens choose independently.
        dispatch_dtype: "fp8": tokens travel as codes where the experts' format quantises them so; or "bfloat16".
        combine_dtype: "fp8": sums travel back as codes, except in an all-gather dispatch; or "bfloat16".
        prefetch_weights: in decode, the next layer's first weights come into L2 while sums travel back.
        beside_shared: the shared expert runs beside the dispatch.
        beside_queries: in decode, cache rows and the indexer's prolog are computed beside MLA's queries.
        two_batches: a step is cut into two halves, and tokens of one travel while the other computes.
        redundant: replicas of experts on all ranks together.
        imbalance: token-expert pairs of the busiest rank over the mean, with these replicas.
    """

    ranks: int
    cp_size: int = 1
    tp_size: int = 1
    dispatch: str = "all_to_all"
    chunk: int = 8192
    weights: str = "fp8"
    cache: str = "bfloat16"
    drafts: int = 0
    balanced: bool = False
    dispatch_dtype: str = "bfloat16"
    combine_dtype: str = "bfloat16"
    prefetch_weights: bool = False
    beside_shared: bool = False
    beside_queries: bool = False
    two_batches: bool = False
    redundant: int = 0
    imbalance: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Placed:
    """A deployment of a model on a device.

    Raises:
        ValueError: sizes that do not divide, or formats that the model or the device does not have.
    """

    def __init__(self, config: ModelConfig, device: Device, how: Deployment, links: Links | None = None):
        self.config, self.device, self.how = config, device, how
        self.links = links or links_of(device)
        self.cache = _cache_format(config, how.cache)
        narrow = how.weights in device.narrow
        sizes = (how.ranks, how.tp_size, bool(how.drafts), how.balanced, how.redundant, how.imbalance)
        self.costs = _costs(config, how.weights, how.cache, narrow, *sizes)
        self.exchange = ExpertExchange(
            config,
            self.links,
            how.ranks,
            narrow=how.dispatch_dtype == "fp8" and how.weights == "fp8" and narrow,
            imbalance=how.imbalance,
            narrow_sums=how.combine_dtype == "fp8",
        )

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

    @property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert in all layers."""
        stages = self.costs.weights.layers[("sparse", self.config.indexer_types[-1])]
        return stages["MoE experts"] * self.config.mlp_layer_types.count("sparse")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the caches."""
        config = self.config.with_mtp(1) if self.how.drafts else self.config
        return cache_bytes_per_token(config, self.cache)

    def cache_room(self, rows: int) -> float:
        """Bytes that remain for caches on a rank with ``rows`` rows in a step; negative if the rest does not fit."""
        meeting = rows * (self.how.ranks if self.how.dispatch == "all_gather" else min(self.how.ranks, 2))
        used = self.weight_bytes + WORKSPACE + activation_bytes(self.config, rows, meeting, torch.bfloat16)
        return UTILIZATION * self.device.memory - used

    def dispatched(self, stages: Stages, own: float, all_rows: float, dispatch: str) -> Stages:
        """The stages of passes over ``own`` of ``all_rows`` rows, with the work that the dispatch adds: if all tokens
        are gathered, the rank quantises those that do not come as codes for 8-bit experts, and writes a sum for each.
        """
        if "MoE combine" not in stages or self.how.ranks == 1 or dispatch != "all_gather":
            return stages
        layers, width = self.config.mlp_layer_types.count("sparse"), self.config.hidden_size
        sums = Work(activations=(all_rows - own) * layers * width * 2)
        quantises = self.costs.formats.narrow_experts and not self.exchange.narrow
        codes = Work(activations=all_rows * layers * width * 3 * quantises)
        added = {"MoE experts": codes, "MoE combine": sums}
        return stages | {name: stages[name] + work for name, work in added.items()}

    def collectives(self, rows: int, gathered_rows: int, logits: int) -> Iterator[tuple[str, float, bool]]:
        """The collectives of a forward pass but those of the experts: (stage, seconds, whether it overlaps the
        queries' prolog).

        Args:
            rows: rows of a rank.
            gathered_rows: rows of a rank whose cache rows the cp group gathers; 0 in decode.
            logits: rows of a rank whose logits are computed.
        """
        c, how, a = self.config, self.how, 2
        layers = c.num_hidden_layers
        if gathered_rows and how.cp_size > 1:
            part = gathered_rows * self.cache.packed_width() * self.cache.latent.pool_dtype.itemsize
            yield "communication", layers * self._even("all_gather", how.cp_size, part), True
        if how.tp_size > 1:
            heads = rows * c.num_attention_heads * c.v_head_dim * a / how.tp_size
            back = self._even("reduce_scatter", how.tp_size, rows * c.hidden_size * a)
            yield "MLA epilog", layers * (self._even("all_to_all", how.tp_size, heads) + back), False
            yield "embedding", back, False
            if logits:
                shard = logits * c.vocab_size * 4 / how.tp_size
                yield "LM head", self._even("all_to_all", how.tp_size, shard), False

    def _even(self, kind: Kind, size: int, part: float) -> float:
        return even_seconds(kind, size, round(part), self.links)


@lru_cache(maxsize=4096)
def _costs(
    config: ModelConfig, weights: str, cache: str, narrow: bool, ranks: int, tp_size: int, module: bool,
    balanced: bool, redundant: int, imbalance: float,
) -> ModelCosts:  # fmt: skip
    """Costs of a rank; deployments that differ in their exchange only have the same object."""
    held = rank_weights(config, weights, ranks, tp_size, module, redundant)
    formats = formats_of(config, _cache_format(config, cache), 2, stored(weights, _one_of_each(config)))
    formats = formats._replace(
        narrow_linear=formats.narrow_linear and narrow, narrow_experts=formats.narrow_experts and narrow
    )
    return ModelCosts(config, held, formats, balanced, redundant, imbalance)


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


def links_of(device: Device) -> Links:
    """The device's links, with the latencies of `parallel/links.py`."""
    known = Links()
    inside = replace(known.inside, name="within a machine", bandwidth_gb_s=device.inside * _LINKED[0] / 1e9)
    between = replace(known.between, name="between machines", bandwidth_gb_s=device.between * _LINKED[1] / 1e9)
    return Links(device.machine_size, known.start_us, inside, between)


def rank_weights(
    config: ModelConfig, weights: str, ranks: int, tp_size: int, module: bool, redundant: int
) -> WeightBytes:
    """Bytes of the weights of the rank with the most experts, by kind of layer and stage."""
    held = cdiv(config.n_routed_experts + redundant, ranks)
    return replace(_weights_of_one(config, weights, tp_size, module), held=held)


@lru_cache(maxsize=64)
def _weights_of_one(config: ModelConfig, weights: str, tp_size: int, module: bool) -> WeightBytes:
    """Bytes of a rank with one expert: all experts have the same size."""
    few, ranks = _one_of_each(config), config.n_routed_experts // tp_size * tp_size
    return WeightBytes.of(rank_model(few, stored(weights, few), torch.bfloat16, ranks, tp_size, int(module)))


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
