"""Options that are left out, chosen by model, devices, ranks and the longest request: a rule and a reason for each.

Rules are closed forms. `tests/commands/planner/test_choice.py` compares what they choose with the best that the search
of ``dsa-engine plan`` finds. On a CPU all options keep their defaults: nothing models a CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsa_engine.config.fields import is_given, plain
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_dtype, cache_format
from dsa_engine.model.rank_weights import WeightBytes
from dsa_engine.options import OPTIONS_OF_DECODE, EngineOptions, options_of_decode
from dsa_engine.parallel.disaggregation import position
from dsa_engine.system.sizes import format_bytes, parse_bytes
from dsa_engine.weights.formats import held_as, quantization_name

logger = logging.getLogger(__name__)

WORKSPACE = 1 << 30  # on CUDA
_LEAST_CHUNK = 2048  # tokens of a rank's prefill step, to make room for the longest request
# Fewest tokens of the longest prompt for a rank of a context-parallel group. Below, the exchange of tokens and reads of
# weights take over; dense attention also expands keys and values of the whole context on every rank.
_LEAST_TOKENS = {
    ("balanced", True): 4096,
    ("throughput", True): 16_384,
    ("balanced", False): 8192,
    ("throughput", False): 65_536,
}


@dataclass(frozen=True)
class Devices:
    """The devices of a run's ranks, or of the part of them that prefills or decodes."""

    ranks: int  # number of ranks
    node_ranks: int  # number of ranks on a node
    memory: int | None  # bytes of a device; None: a CPU

    @property
    def nodes(self) -> int:
        return cdiv(self.ranks, self.node_ranks)


@dataclass
class Choice:
    """What is known when an option is chosen, and the options so far."""

    options: EngineOptions
    config: ModelConfig  # the model's, with the MTP modules that draft as further layers
    devices: Devices
    longest: int  # maximum number of tokens of a request
    stored: QuantizationConfig | None  # the format in which linear layers and experts are held; None: in ``dtype``
    dtype: torch.dtype = torch.bfloat16  # of the run
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            self.values[name] = value = getattr(self.options, name, getattr(self.options.parallel, name, None))
            if not is_given(value) or (name, value) == ("kv_cache_dtype", "auto"):
                value, self.reasons[name] = rule(self) if self.devices.memory else _on_cpu(self, name)
                self.values[name] = plain(value)  # chosen once

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that were left out."""
        return {name: self.values[name] for name in self.reasons}

    def applied(self) -> EngineOptions:
        """The options with those that were left out."""
        parallel = {name: value for name, value in self.chosen.items() if not hasattr(self.options, name)}
        others = {name: value for name, value in self.chosen.items() if hasattr(self.options, name)}
        return replace(self.options, parallel=replace(self.options.parallel, **parallel), **others)

    def log(self, part: str = "") -> None:
        """Logs the choice in two lines."""
        where = f"{self.devices.ranks} rank(s) on {self.devices.nodes} node(s){part}"
        values = ", ".join(f"{name} {value}" for name, value in self.chosen.items())
        logger.info("chosen for optimize=%s on %s: %s", self.options.optimize, where, values or "nothing, all is given")
        alike: dict[str, list[str]] = {}
        for name, why in self.reasons.items():
            alike.setdefault(why, []).append(name)
        logger.info("reasons: %s", "; ".join(f"{', '.join(names)}: {why}" for why, names in alike.items()))

    def room(self, tp_size: int, chunk: int) -> float:
        """Bytes of a device beside weights, workspace and a prefill step of ``chunk`` tokens a rank; approximate."""
        assert self.devices.memory is not None
        usable, given = self.options.gpu_memory_utilization * self.devices.memory, self.options.workspace
        workspace = WORKSPACE if given is None else parse_bytes(given, "workspace")
        held, gathered = self.weights(tp_size).total(self.config, drafts=False), chunk * min(self.devices.ranks, 2)
        return cache_room(usable, held, self.config, chunk, gathered, self.dtype, workspace)

    def weights(self, tp_size: int) -> WeightBytes:
        return WeightBytes.of_rank(self.config, self.stored, self.dtype, self.devices.ranks, tp_size)

    @property
    def cached_as(self) -> CacheFormat:
        return cache_format(self.config, cache_dtype(self.values["kv_cache_dtype"], self.dtype))

    def request_bytes(self) -> int:
        """Bytes of the longest request in the caches."""
        return self.longest * cache_bytes_per_token(self.config, self.cached_as)


def chosen_options(
    options: EngineOptions, config: ModelConfig, longest: int, device: torch.device, dtype: torch.dtype
) -> EngineOptions:
    """The options with those that were left out, for all ranks of the run; those of ranks that only decode are in
    ``decode_options``. Logs them on rank 0."""
    stored = config.quantization if held_as(config.quantization, options.quantization, device) else None
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    parallel = options.parallel
    (rank, ranks), prefills = parallel.run_position(), parallel.prefill_ranks

    def choose(options: EngineOptions, ranks: int, part: str = "") -> Choice:
        devices = Devices(ranks, min(ranks, parallel.node_ranks()) if memory else ranks, memory)
        choice = Choice(options, config, devices, longest, stored, dtype)
        if rank == 0 and memory is not None:
            choice.log(part)
        return choice

    if prefills is None:
        return choose(options, ranks).applied()
    position(parallel)  # there is a rank to decode
    decode = choose(options_of_decode(options), ranks - prefills, " that decode").chosen
    own = {name: value for name, value in decode.items() if name in OPTIONS_OF_DECODE} | options.decode_options
    return replace(choose(options, prefills, " that prefill").applied(), decode_options=own)


def _on_cpu(choice: Choice, name: str) -> tuple[Any, str]:
    own = {"cp_size": choice.devices.ranks, "enable_dbo": False}
    return own.get(name, choice.values[name]), "the default on a CPU"


def _kv_cache_dtype(choice: Choice) -> tuple[str, str]:
    if quantization_name(choice.stored) == "fp8" and choice.config.has_indexer and choice.dtype == torch.bfloat16:
        try:
            cache_format(choice.config, cache_dtype("fp8", choice.dtype))
            return "fp8", "weights are FP8 too, and it takes half of the memory"
        except ValueError:
            return "auto", "the model's sizes have no FP8 format"
    return "auto", "FP8 would change numbers beyond rounding, as weights are not FP8, or attention is dense"


def _tp_size(choice: Choice) -> tuple[int, str]:
    config, devices = choice.config, choice.devices
    columns = config.num_attention_heads * config.v_head_dim
    schemes = config.quantization.schemes if config.quantization else ()
    whole = any(scheme.actorder for scheme in schemes)  # columns of a group lie anywhere: no rank has a part of them
    sizes = [n for n in (8, 4, 2) if devices.node_ranks % n == devices.ranks % n == columns % (128 * n) == 0]
    if not sizes or whole:
        return 1, "nothing to divide by"
    if choice.options.optimize != "throughput":
        return sizes[0], "a decode step reads fewer weights"
    if sizes[0] <= 4:
        return sizes[0], "few ranks exchange for less than the weights that they need not read"
    if choice.room(1, 0) < (devices.memory or 0) / 4:
        return sizes[0], "weights would leave under a quarter of the memory"
    return 1, "weights fit, and prefill needs no further collectives"


def _cp_size(choice: Choice) -> tuple[int, str]:
    ranks, sparse = choice.devices.ranks, choice.config.has_indexer
    if choice.options.optimize == "latency":
        return ranks, "all ranks shorten the time to the first token"
    least = _LEAST_TOKENS[choice.options.optimize, sparse]
    size = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * least <= max(least, choice.longest))
    return size, f"at least {least:,} tokens of the longest prompt for a rank"


def _dcp_size(choice: Choice) -> tuple[int, str]:
    """The smallest with room for the longest request, first of those that lie inside a node."""
    if choice.options.batch_invariant:
        return 1, "sums of several ranks' parts would depend on their number"
    node, limit = choice.devices.node_ranks, math.gcd(choice.values["cp_size"], choice.devices.ranks)
    sizes = [size for size in range(1, limit + 1) if limit % size == 0]
    sizes.sort(key=lambda size: node % size > 0)
    room, needed = choice.room(choice.values["tp_size"], _LEAST_CHUNK), choice.request_bytes()
    rows = (
        choice.cached_as.packed_width(index_key=choice.config.has_indexer) * choice.cached_as.latent.pool_dtype.itemsize
    )
    coming = 2 * choice.longest * rows  # of two layers, from other ranks, in a prefill
    size = next((size for size in sizes if needed / size + coming * (size > 1) <= room), max(sizes))
    beside = format_bytes(max(0, int(room)))
    return size, f"the longest request takes {format_bytes(needed)}, a rank has {beside} beside weights and steps"


def _max_num_batched_tokens(choice: Choice) -> tuple[int, str]:
    sparse, own = choice.config.has_indexer, cdiv(choice.longest, choice.values["cp_size"])
    chunk = 4096 if sparse else min(16_384, max(4096, next_power_of_2(own)))
    cached = 1.25 * choice.request_bytes() / choice.values["dcp_size"]
    needed = choice.values["max_num_seqs"] * _request_rows(choice) + cached
    while chunk > _LEAST_CHUNK and choice.room(choice.values["tp_size"], chunk) < needed:
        chunk //= 2
    return chunk, "it keeps the device busy" if sparse else "larger chunks expand keys and values less often"


def _enable_dbo(choice: Choice) -> tuple[bool, str]:
    ranks, nodes = choice.devices.ranks, choice.devices.nodes
    if choice.config.has_indexer:
        return ranks > 1, "computation hides the exchange of tokens" if ranks > 1 else "nothing travels"
    hides = nodes > 1 and choice.options.optimize != "latency"
    return hides, "computation hides the links between nodes" if hides else "keys and values would expand twice"


def _max_num_seqs(choice: Choice) -> tuple[int, str]:
    ranks, room = choice.devices.ranks, choice.room(choice.values["tp_size"], 0)
    cached, steps = int(ranks * room / choice.request_bytes()), int(room / 8 / _request_rows(choice))
    least, each = {"latency": (8, 1), "balanced": (64, 16), "throughput": (256, 128)}[choice.options.optimize]
    number = max(8, min(max(least, min(each * ranks, cached)), steps))
    why = f"caches hold {cached:,} of the longest, and rows of {steps:,} take an eighth of the memory beside weights"
    return 1 << (number.bit_length() - 1), why


def _request_rows(choice: Choice) -> int:
    """Bytes that a request takes in the largest decode step: a rank may come to run all, so each counts on all ranks,
    in the step, its graph and the warm-up of that, and in tables of the vocabulary."""
    step = activation_bytes(choice.config, 1, choice.devices.ranks, choice.dtype)
    return 3 * step + 8 * choice.config.vocab_size


def _redundant_experts(choice: Choice) -> tuple[int, str]:
    config, parallel, ranks = choice.config, choice.options.parallel, choice.devices.ranks
    if (parallel.expert_loads is None and parallel.rebalance_every is None) or ranks == 1:
        return 0, "loads are not known"
    replica = choice.weights(choice.values["tp_size"]).expert(config)
    fits = replica * 20 <= (choice.devices.memory or 0)
    return (ranks, "one a rank shares the largest loads") if fits else (0, "one a rank takes over 5% of the memory")


RULES: dict[str, Callable[[Choice], tuple[Any, str]]] = {
    "kv_cache_dtype": _kv_cache_dtype,
    "tp_size": _tp_size,
    "cp_size": _cp_size,
    "dcp_size": _dcp_size,
    "max_num_seqs": _max_num_seqs,
    "max_num_batched_tokens": _max_num_batched_tokens,
    "moe_dispatch": lambda _: ("auto", "the fastest for the size of a step, by modelled links"),
    "enable_dbo": _enable_dbo,
    "redundant_experts": _redundant_experts,
}


def cache_room(
    usable: float, weights: float, config: ModelConfig, tokens: int, gathered: int, dtype: torch.dtype,
    workspace: int = WORKSPACE,
) -> float:  # fmt: skip
    """Bytes that remain for caches of ``usable`` ones of a device, with ``weights`` bytes of weights and a step of
    ``tokens`` tokens (:func:`activation_bytes`); negative if the rest does not fit."""
    return usable - (weights + workspace + activation_bytes(config, tokens, gathered, dtype))


def activation_bytes(config: ModelConfig, tokens: int, gathered: int, dtype: torch.dtype) -> int:
    """Estimate of the largest set of activations in a forward pass over ``tokens`` tokens, before anything is made. An
    engine runs the step and counts instead (`warm_up.py`).

    ``gathered`` tokens arrive at this rank's experts: their rows are counted, and their sums in float32. The experts'
    own activations are counted for ``tokens``, the tokens of a rank under balanced routing.
    """
    attention = config.num_attention_heads * (config.qk_head_dim + 2 * config.latent_dim + 2 * config.kv_lora_rank)
    experts = config.num_experts_per_tok * (3 * config.moe_intermediate_size + 3 * config.hidden_size)
    arriving = gathered * config.hidden_size * (2 * dtype.itemsize + 4)
    return tokens * dtype.itemsize * (8 * config.hidden_size + max(attention, experts)) + arriving
