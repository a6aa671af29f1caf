"""One way to use some ranks for prefill or decode: its counted work, and its memory on a rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from dsa_engine.commands.planner.devices import Device
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.config.released import released_fp8
from dsa_engine.engine.startup.choice import cache_room
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.context_exchanges import Exchange, decode_exchanges, prefill_exchanges, row_bytes
from dsa_engine.measure.costs.model_costs import ModelCosts
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_dtype, cache_format
from dsa_engine.model.rank_weights import WeightBytes
from dsa_engine.options import EngineOptions
from dsa_engine.parallel.experts import KINDS, DispatchMethod
from dsa_engine.parallel.experts.traffic import DispatchChoice, RouterShape, RowBytes, exchange, quantized_bytes
from dsa_engine.parallel.links import Links
from dsa_engine.weights.convert.schemes import stored_as

_LINKED = (0.8, 0.9)  # usable fraction of nominal rates: inside a node, between nodes (parallel/links.py)


@dataclass(frozen=True)
class Deployment:
    """The way in which some ranks run the model."""

    ranks: int  # over which the experts are divided
    cp_size: int = 1  # ranks that prefill a prompt together
    tp_size: int = 1  # neighbouring ranks over which embedding, o_proj and LM head are cut
    chunk: int = 8192  # maximum number of tokens of a rank in a prefill step
    weights: str = "fp8"  # one of ``WEIGHTS``
    cache: str = "bfloat16"  # one of ``CACHES``
    drafts: int = 0  # in a decode step
    dcp_size: int = 1  # ranks of those that prefill a prompt together that hold its cache together
    hot_rows: int = 0  # of a request, whose other latent rows lie in host memory; 0: all lie on the device


class Placed:
    """A deployment of a model on a device."""

    def __init__(self, config: ModelConfig, device: Device, how: Deployment):
        self.config, self.device, self.how = config, device, how
        self.narrow = how.weights in device.narrow  # whether products of weights have 8-bit inputs
        self.links, self.nodes = links_of(device), cdiv(how.ranks, device.node_size)
        self.cache = cache_format(config, cache_dtype(how.cache, torch.bfloat16))
        weights = WeightBytes.of_rank(config, stored(how.weights, config), torch.bfloat16, how.ranks, how.tp_size)
        self.costs = ModelCosts(config, weights, self.cache)
        hidden, top_k = config.hidden_size, config.num_experts_per_tok
        block = 128 if how.weights == "fp8" else hidden  # codes with one scale
        sent = quantized_bytes(hidden, block) if self.narrow else 2 * hidden
        self.row = RowBytes.of(sent, top_k, 2 * hidden)
        self.routing = RouterShape(config.n_routed_experts, top_k, config.n_group, config.topk_group)
        self._choice = DispatchChoice([rank // device.node_size for rank in range(how.ranks)], links=self.links)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights on the rank with the most experts, as ``dsa-engine info`` counts them."""
        return self.costs.weights.total(self.config, bool(self.how.drafts))

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in the caches."""
        config = self.config.with_mtp(1) if self.how.drafts else self.config
        return cache_bytes_per_token(config, self.cache)

    @cached_property
    def latent_bytes(self) -> int:
        """Those of its latent rows."""
        return (self.config.num_hidden_layers + bool(self.how.drafts)) * self.cache.latent.row_bytes

    @property
    def device_bytes(self) -> int:
        """Those on the device; with hot rows all pages count as spilled ones."""
        return self.token_bytes - (self.latent_bytes if self.how.hot_rows else 0)

    def cache_room(self, rows: int, dispatch: DispatchMethod = "all_gather") -> float:
        """Bytes that remain for caches on a rank with ``rows`` rows in a step; negative if the rest does not fit."""
        meeting = rows * (self.how.ranks if KINDS[dispatch].static_decode else min(self.how.ranks, 2))
        usable = EngineOptions.gpu_memory_utilization * self.device.memory_gb * 1e9
        return cache_room(usable, self.weight_bytes, self.config, rows, meeting, torch.bfloat16)

    def cached(self, tokens: int, requests: int) -> float:
        """Bytes on a rank for ``requests`` requests of all ranks, of so many tokens each."""
        hot = self._together(requests) * self.how.hot_rows * self.latent_bytes
        return hot + self._together(requests) * tokens * self.device_bytes / self.how.dcp_size

    def spilled(self, tokens: int, requests: int) -> float:
        """Bytes of host memory on a rank for them."""
        return self._together(requests) * tokens * (self.token_bytes - self.device_bytes) / self.how.dcp_size

    def _together(self, requests: int) -> int:
        """Requests of the ranks that hold them together."""
        return cdiv(requests, self.how.ranks // self.how.dcp_size)

    def prefilled(self, tokens: int) -> float:
        """Bytes on a rank for a prompt that is prefilled: its pages, and rows of two layers that come from other
        ranks or from host memory."""
        comes = self.how.dcp_size > 1 or self.how.hot_rows > 0
        buffers = 2 * tokens * row_bytes(self.cache, indexer=self.config.has_indexer) * comes
        return tokens * self.device_bytes / self.how.dcp_size + buffers

    def decode_exchanges(self, rows: float) -> dict[bool, list[Exchange]]:
        """Collectives of a decode layer's attention with ``rows`` rows of each rank, with an indexer and without."""
        given = self.config, self.cache, rows, self.how.dcp_size
        return {indexer: decode_exchanges(*given, indexer=indexer) for indexer in (True, False)}

    def context_parallel(self, rows: float) -> float:
        """Seconds of the collectives of attention in all layers of a decode step."""
        c = self.config
        seconds = {
            indexer: sum(one.seconds(self.links, self.device.node_size) for one in exchanges)
            for indexer, exchanges in self.decode_exchanges(rows).items()
        }
        full = c.indexer_types[: c.num_hidden_layers].count("full")
        drafted = self.how.drafts * seconds[c.has_indexer]
        return full * seconds[True] + (c.num_hidden_layers - full) * seconds[False] + drafted

    def gather_of_contexts(self, tokens: int, chunk: int) -> float:
        """Seconds in which the rows of earlier chunks come from other ranks in a prefill, in all layers; 0 where a rank
        holds all pages."""
        c, how = self.config, self.how
        if how.dcp_size == 1:
            return 0.0
        kinds = Counter(c.indexer_types[: c.num_hidden_layers])
        return sum(
            layers * one.seconds(self.links, self.device.node_size)
            for start in range(chunk * how.cp_size, tokens, chunk * how.cp_size)
            for kind, layers in kinds.items()
            for one in prefill_exchanges(self.cache, 0, start, 1, how.dcp_size, indexer=kind == "full")
        )

    def dispatch(self, rows: int) -> DispatchMethod:
        """The dispatch of a prefill step that ``moe_dispatch="auto"`` takes."""
        return self._choice.method(rows, rows * self.config.num_experts_per_tok, self.row, self.routing)

    def exchange(self, dispatch: DispatchMethod, rows: int) -> float:
        """Seconds in which a layer's tokens travel to their experts and back."""
        return exchange(dispatch, rows, self.how.ranks, self.nodes, self.row, self.routing, self.links)

    def tensor_parallel(self, rows: int) -> float:
        """Seconds of the collectives around o_proj of all layers, for ``rows`` rows of each rank."""
        c, tp = self.config, self.how.tp_size
        group = tp, cdiv(tp, self.device.node_size)
        heads = self.links.all_to_all(*group, 2 * rows * c.num_attention_heads * c.v_head_dim / tp)
        return c.num_hidden_layers * (heads + self.links.ring(*group, 2 * rows * c.hidden_size))


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
    inside = replace(known.inside, bandwidth_gb_s=device.inside_gb_s * _LINKED[0])
    between = replace(known.between, bandwidth_gb_s=device.between_gb_s * _LINKED[1])
    return Links(known.start_us, inside, between)
