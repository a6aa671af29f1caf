"""The ``config.json`` keys of the released models, for sizes and for random checkpoints of real layers."""

from __future__ import annotations

import copy
from typing import Any

from dsa_engine.config.keys import Keys
from dsa_engine.config.quantization import QuantizationConfig

RELEASED_BLOCK_SIZE = (128, 128)  # rows and columns of a weight that share a scale

# The ``quantization_config`` of the FP8 releases; V3.2's also has ``scale_fmt``.
RELEASED_QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(RELEASED_BLOCK_SIZE),
}

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 0,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
}

_DEEPSEEK: dict[str, Any] = _COMMON | {
    "eos_token_id": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "n_group": 8,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

# GLM-5 (FP8 release)
_GLM_5: dict[str, Any] = _COMMON | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "eos_token_id": [154820, 154827, 154829],
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "quantization_config": RELEASED_QUANTIZATION,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

# GLM-5.2 and 5.3 (FP8 releases): an indexer in the layers 0, 1, 2, 6, 10, … 74, and in the MTP module
_GLM_5_2: dict[str, Any] = _GLM_5 | {
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 1048576,
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}

RELEASED_CONFIGS: dict[str, dict[str, Any]] = {
    # DeepSeek-V3.2-Exp and V3.2
    "deepseek_v32": _DEEPSEEK
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
        "quantization_config": RELEASED_QUANTIZATION | {"scale_fmt": "ue8m0"},
    },
    # DeepSeek-V3 and R1
    "deepseek_v3": _DEEPSEEK
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "quantization_config": RELEASED_QUANTIZATION,
    },
    "glm_moe_dsa": _GLM_5,
    "glm_5_2": _GLM_5_2,
    "glm_5_3": _GLM_5_2,
}


# Hub ids with these configurations; the first of each is its FP8 checkpoint in commands.
_OF_DEEPSEEK_V3 = "V3 V3-Base V3-0324 V3.1 V3.1-Base V3.1-Terminus R1 R1-Zero R1-0528"
HUB_IDS = {
    **{f"deepseek-ai/DeepSeek-V3.2{last}": "deepseek_v32" for last in ("", "-Exp", "-Exp-Base", "-Speciale")},
    **{f"deepseek-ai/DeepSeek-{name}": "deepseek_v3" for name in _OF_DEEPSEEK_V3.split()},
    **dict.fromkeys(("zai-org/GLM-5-FP8", "zai-org/GLM-5"), "glm_moe_dsa"),
    **dict.fromkeys(("zai-org/GLM-5.2-FP8", "zai-org/GLM-5.2"), "glm_5_2"),
    **dict.fromkeys(("zai-org/GLM-5.3", "zai-org/GLM-5.3-BF16"), "glm_5_3"),
}
_PLAIN_HUB_IDS = ("zai-org/GLM-5", "zai-org/GLM-5.2", "zai-org/GLM-5.3-BF16")  # in bfloat16


def released_fp8() -> QuantizationConfig:
    """The FP8 format of releases, for a model whose checkpoint is in plain numbers."""
    read = QuantizationConfig.from_keys(Keys({"quantization_config": RELEASED_QUANTIZATION}))
    assert read is not None
    return read


def released_config(name: str) -> dict[str, Any]:
    """A copy of the raw configuration of a released model, by its name here or its hub id."""
    known = HUB_IDS.get(name, name)
    if known not in RELEASED_CONFIGS:
        raise ValueError(f"no released configuration {name!r}; there are {', '.join(RELEASED_CONFIGS)}")
    config = copy.deepcopy(RELEASED_CONFIGS[known])
    if name in _PLAIN_HUB_IDS:
        del config["quantization_config"]
    return config
