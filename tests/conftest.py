"""Fixtures that several test files share: random checkpoints written by ``transformers``, and its logits for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

BASE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
INDEXER: dict[str, Any] = {"index_topk": 64, "index_head_dim": 24, "index_n_heads": 12}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass
class Oracle:
    """A checkpoint folder and the ``transformers`` model (float32) that wrote it."""

    folder: Path
    model: Any

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 ``[len, vocab]``."""
        return self.model(torch.tensor([ids])).logits[0].float()

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()


def random_ids(length: int, vocab: int = 200, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 7919 + length)
    return [rng.randrange(2, vocab) for _ in range(length)]


def write_oracle(folder: Path, model_type: str, seed: int = 0, **overrides: Any) -> Oracle:
    """Saves a random model of ``transformers`` whose attention and selection are far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = BASE | (INDEXER if model_type != "deepseek_v3" else {}) | overrides
    config = AutoConfig.for_model(model_type, **keys)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if tensor.dim() >= 2:
                tensor.normal_(std=1.0 if "embed" in name else 1.5 * tensor.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                tensor.normal_(std=0.1)
            else:
                tensor.normal_(mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return Oracle(folder, model)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Oracle]:
    """``oracle(model_type, **config_overrides)``: made once per session for the same arguments."""
    made: dict[str, Oracle] = {}

    def get(model_type: str, **overrides: Any) -> Oracle:
        key = repr((model_type, sorted(overrides.items())))
        if key not in made:
            made[key] = write_oracle(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return get
