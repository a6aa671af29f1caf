"""Estimates of a rank's memory from the model's sizes, before anything is made."""

from __future__ import annotations

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.runtime.integers import cdiv

WORKSPACE = 1 << 30  # on CUDA
# Bytes of a weight in linear layers, and in experts, with their scales.
_WEIGHT_BYTES = {"fp8": (1.0, 1.0), "int8": (1.0, 1.0), "int4-experts": (2.0, 0.53)}


def rank_weight_bytes(config: ModelConfig, weights: str | None, ranks: int, tp_size: int, itemsize: int) -> float:
    """Bytes of a rank's weights, approximately: the large matrices. W_UK and W_UV are held in plain numbers."""
    each, hidden = _WEIGHT_BYTES.get(weights or "", (itemsize, itemsize))[0], config.hidden_size
    heads = config.num_attention_heads
    indexer = config.index_head_dim * (config.q_lora_rank * config.index_n_heads + hidden)
    attention = hidden * (config.q_lora_rank + config.latent_dim) + config.q_lora_rank * heads * config.qk_head_dim
    output = heads * config.v_head_dim * hidden / tp_size
    up = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    layers, sparse = len(config.mlp_layer_types), config.mlp_layer_types.count("sparse")
    shared = config.n_shared_experts * config.moe_intermediate_size
    total = layers * (each * (attention + output) + itemsize * up) + each * indexer * config.indexer_types.count("full")
    total += 3 * hidden * each * ((layers - sparse) * config.intermediate_size + sparse * shared)
    total += cdiv(config.n_routed_experts, ranks) * expert_bytes(config, weights, itemsize)
    return total + 2 * config.vocab_size * hidden * itemsize / tp_size


def expert_bytes(config: ModelConfig, weights: str | None, itemsize: int) -> float:
    """Bytes of an expert in each layer."""
    each = _WEIGHT_BYTES.get(weights or "", (itemsize, itemsize))[1]
    return config.mlp_layer_types.count("sparse") * 3 * config.hidden_size * config.moe_intermediate_size * each


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
