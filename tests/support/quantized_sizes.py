"""Sizes of small models that FP8 caches hold, with several blocks of 128."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 204,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "kv_lora_rank": 128,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "float32",
}
INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 12}
