"""One way to use some ranks for prefill or decode: its memory on a rank, and its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from dsa_engine.commands.planner.devices import Device
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.config.released import released_fp8
from dsa_engine.convert.schemes import stored_as
from dsa_engine.engine.startup.kernel_check import layers_of_each_kind
from dsa_engine.engine.startup.memory import activation_bytes
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.model_costs import ModelCosts, formats_of
from dsa_engine.measure.costs.weights import WeightBytes
from dsa_engine.measure.costs.work import Stages, Work
from dsa_engine.measure.weight_memory import rank_model
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.options import EngineOptions
from dsa_engine.parallel.collective_log import Collective, Kind
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
        dispatch: how tokens reach experts: one of ``DISPATCHES``.
        chunk: maximum number of tokens of a rank in a prefill step.
        weights: one of ``WEIGHTS``.
        cache: one of ``CACHES``.
        drafts: number of drafts in a decode step.
        balanced: experts have equal loads in every step, as with perfect replicas; else tokens choose independently.
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
        weights = rank_weights(config, how.weights, how.ranks, how.tp_size, bool(how.drafts))
        self.cache = cache_format(config, torch.float8_e4m3fn if how.cache == "fp8" else torch.bfloat16)
        formats = formats_of(config, self.cache, 2, stored(how.weights, _one_of_each(config)))
        narrow = how.weights in device.narrow
        formats = formats._replace(
            narrow_linear=formats.narrow_linear and narrow, narrow_experts=formats.narrow_experts and narrow
        )
        self.costs = ModelCosts(config, weights, formats, how.balanced)

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

    def dispatched(self, stages: Stages, own: float, all_rows: float) -> Stages:
        """The stages of passes over ``own`` of ``all_rows`` rows, with the work that the dispatch adds: if all tokens
        are gathered, the rank quantises each of them for 8-bit experts, and writes a sum for each."""
        if "MoE combine" not in stages or self.how.ranks == 1 or self.how.dispatch != "all_gather":
            return stages
        layers, width = self.config.mlp_layer_types.count("sparse"), self.config.hidden_size
        sums = Work(activations=(all_rows - own) * layers * width * 2)
        codes = Work(activations=all_rows * layers * width * 3 * self.costs.formats.narrow_experts)
        added = {"MoE experts": codes, "MoE combine": sums}
        return stages | {name: stages[name] + work for name, work in added.items()}

    def collectives(self, rows: int, gathered_rows: int, logits: int) -> Iterator[tuple[str, float, bool]]:
        """The collectives of a forward pass: (stage, seconds, whether it overlaps the queries' prolog).

        Args:
            rows: rows of a rank.
            gathered_rows: rows of a rank whose cache rows the cp group gathers; 0 in decode.
            logits: rows of a rank whose logits are computed.
        """
        c, how, a = self.config, self.how, 2
        layers, moes = c.num_hidden_layers, c.mlp_layer_types.count("sparse")
        if gathered_rows and how.cp_size > 1:
            part = gathered_rows * self.cache.packed_width() * self.cache.latent.pool_dtype.itemsize
            yield "communication", layers * self._even("all_gather", how.cp_size, part), True
        if how.ranks > 1:
            row = c.hidden_size * a
            words = c.num_experts_per_tok * 8
            if how.dispatch == "all_gather":
                yield "MoE dispatch", moes * self._even("all_gather", how.ranks, rows * (row + words)), False
                yield "MoE combine", moes * self._even("reduce_scatter", how.ranks, rows * row), False
            else:
                # A token goes once to each rank that holds one of its experts.
                reached = rows * (1 - (1 - 1 / how.ranks) ** c.num_experts_per_tok)
                there = self._even("all_to_all", how.ranks, reached * (row + words))
                counts = self._even("all_gather", how.ranks, 8 * how.ranks)  # tokens and choices for each rank
                yield "MoE dispatch", moes * (there + counts), False
                yield "MoE combine", moes * self._even("all_to_all", how.ranks, reached * row), False
        if how.tp_size > 1:
            heads = rows * c.num_attention_heads * c.v_head_dim * a / how.tp_size
            back = self._even("reduce_scatter", how.tp_size, rows * c.hidden_size * a)
            yield "MLA epilog", layers * (self._even("all_to_all", how.tp_size, heads) + back), False
            yield "embedding", back, False
            if logits:
                shard = logits * c.vocab_size * 4 / how.tp_size
                yield "LM head", self._even("all_to_all", how.tp_size, shard), False

    def _even(self, kind: Kind, size: int, part: float) -> float:
        """Seconds of a collective over the first ``size`` ranks, ``part`` bytes from each, to each in an all-to-all."""
        return _collective_seconds(kind, size, round(part), self.links)


@lru_cache(maxsize=65536)
def _collective_seconds(kind: Kind, size: int, part: int, links: Links) -> float:
    counts = (0, *(part,) * (size - 1))
    machines = [rank // links.machine_size for rank in range(size)]
    return links.seconds(Collective(kind, tuple(range(size)), 0, counts, counts), machines)


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


def rank_weights(config: ModelConfig, weights: str, ranks: int, tp_size: int, module: bool) -> WeightBytes:
    """Bytes of the weights of the rank with the most experts, by kind of layer and stage."""
    return replace(_weights_of_one(config, weights, tp_size, module), held=cdiv(config.n_routed_experts, ranks))


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
