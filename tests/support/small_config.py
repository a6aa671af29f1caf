"""The keys of a small ``config.json`` of DeepSeek-V3.2."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_topk": 16,
    "index_head_dim": 12,
    "index_n_heads": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 2048,
}
