"""Estimates of a rank's memory from the model's sizes, before anything is made."""

from __future__ import annotations

import torch

from dsa_engine.config.model import ModelConfig

WORKSPACE = 1 << 30  # on CUDA


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
