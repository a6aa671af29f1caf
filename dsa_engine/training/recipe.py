"""The recipe of the shipped model: its configuration, the phases of its training, and every constant of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsa_engine.config.released import released_config
from dsa_engine.training.vocabulary import VOCAB_SIZE

SEED = 10


def model_config() -> dict[str, Any]:
    """The model's ``config.json``, with the keys of a released one; a new dictionary every time."""
    released = released_config("deepseek_v32")
    return {
        "description": "small DSA model trained by scripts/train_demo.py of dsa_engine",
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 256,
        "index_head_dim": 128,
        "index_n_heads": 12,
        "index_topk": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "kv_lora_rank": 128,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "quantization_config": released["quantization_config"],
        "rms_norm_eps": 1e-06,
        "rope_scaling": released["rope_scaling"],
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 64,
        "vocab_size": VOCAB_SIZE,
    }


# Highest learning rates, and their first steps.
MUON_RATE, ADAM_RATE, WARMUP_STEPS = 0.01, 0.004, 20
WEIGHT_DECAY = 0.1
MTP_WEIGHT = 0.3  # lambda of equation 25 in the DeepSeek-V3 report, its value for most of the training
BALANCE_SPEED = 0.002  # of the router's correction bias


@dataclass(frozen=True)
class Phase:
    """Some steps of the same kind.

    Attributes:
        kind: of attention, see :class:`dsa_engine.training.attention.Mode`; in "warmup" only the indexers learn.
        steps: optimiser steps.
        batch: documents of a step.
        length: tokens of a document.
        topk: tokens that a query attends to in a sparse phase.
        rate: learning rate of the main model as a share of the highest, at the phase's start and at its end.
        index_rate: the same of the indexers.
        guide: weight of the guided heads' loss (:mod:`dsa_engine.training.guides`), at the start and at the end.
        plain: share of documents that are text only.
        restate: share of the other documents that state facts a second time instead of asking for them.
        spacing: tokens of text and facts per fact: the least and the most.
        jumps: whether positions have gaps, so that short documents show long distances.
        echo: share of the documents, text aside, that only say random numbers again and again.
        mtp: whether the MTP module learns too.
    """

    name: str
    kind: str
    steps: int
    batch: int
    length: int
    topk: int = 0
    rate: tuple[float, float] = (1.0, 1.0)
    index_rate: tuple[float, float] = (0.0, 0.0)
    guide: tuple[float, float] = (0.0, 0.0)
    plain: float = 0.25
    restate: float = 0.2
    spacing: tuple[float, float] = (14.0, 200.0)
    jumps: bool = True
    echo: float = 0.0
    mtp: bool = True


# Documents of 64 tokens first: there the circuit that finds a fact forms within a few hundred steps. Then longer ones,
# the indexers' warm-up, and sparse attention, first with as hard a choice at a short length, then with the model's own.
FACTS: dict[str, Any] = {"echo": 0.4, "plain": 0.0, "restate": 0.5, "spacing": (6.5, 9.0), "jumps": False, "mtp": False}
SHORT: dict[str, Any] = {"echo": 0.1, "plain": 0.2, "spacing": (8.0, 30.0), "jumps": False}
CROWDED: dict[str, Any] = {"plain": 0.15, "restate": 0.1, "spacing": (8.0, 60.0)}  # as many facts as 16K tokens have
PHASES = (
    Phase("facts", "dense", 240, 32, 64, guide=(1.0, 1.0), **FACTS),
    Phase("short", "dense", 200, 32, 128, guide=(1.0, 0.0), **SHORT),
    Phase("middle", "dense", 250, 8, 512, rate=(1.0, 0.6)),
    Phase("warm-up", "warmup", 40, 4, 1024, rate=(0.0, 0.0), index_rate=(1.0, 1.0)),
    Phase("sparse", "sparse", 100, 4, 1024, 64, rate=(0.6, 0.3), index_rate=(1.0, 0.5)),
    Phase("crowded", "sparse", 90, 2, 2048, 128, rate=(0.5, 0.3), index_rate=(0.6, 0.4), **CROWDED),
    Phase("finer", "sparse", 80, 2, 2048, 256, rate=(0.3, 0.1), index_rate=(0.4, 0.2), **CROWDED),
    Phase("long", "sparse", 20, 1, 4096, 256, rate=(0.1, 0.05), index_rate=(0.2, 0.1), **CROWDED),
    Phase(
        "longest", "sparse", 4, 1, 8192, 256, rate=(0.05, 0.01), index_rate=(0.1, 0.05), plain=0.0, spacing=(14.0, 60.0)
    ),
    Phase("settling", "sparse", 80, 2, 2048, 256, rate=(0.2, 0.01), index_rate=(0.2, 0.02), **CROWDED),
)
