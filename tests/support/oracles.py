"""Random checkpoints of ``transformers``, its logits for them, and the rule by which logits are compared."""

from __future__ import annotations

import copy
import random
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
# Options of an engine for a few short requests, in pages that they cross often.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 96,
    "page_size": 4,
    "cache_memory": "2MiB",
    "progress": False,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# name: model type, changes to the fixture's base configuration, tokens
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "v32": ("deepseek_v32", {}, 700),
    "v32-yarn-long": ("deepseek_v32", {"rope_parameters": YARN, "index_topk": 256, "num_hidden_layers": 2}, 3000),
    "v32-small-selection": (
        "deepseek_v32",
        {
            "index_topk": 16,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 40,
            "n_shared_experts": 2,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        },
        900,
    ),
    "v32-tied": (
        "deepseek_v32",
        {
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "n_group": 6,
            "topk_group": 3,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 0,
            "index_n_heads": 20,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.0, "beta_fast": 16},
        },
        650,
    ),
    "glm": (
        "glm_moe_dsa",
        {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "qk_nope_head_dim": 24, "v_head_dim": 32},
        700,
    ),
    "glm-shared": (
        "glm_moe_dsa",
        {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"], "num_attention_heads": 9},
        600,
    ),
    "glm-frequency": (
        "glm_moe_dsa",
        {"num_hidden_layers": 5, "index_topk_freq": 3, "index_skip_topk_offset": 1, "index_topk": 32},
        600,
    ),
    "glm-pattern": ("glm_moe_dsa", {"num_hidden_layers": 3, "index_topk_pattern": "FSS", "index_topk": 100}, 620),
    "v3": ("deepseek_v3", {"rope_parameters": YARN}, 800),
    "v3-one-group": (
        "deepseek_v3",
        {"n_group": 1, "topk_group": 1, "num_attention_heads": 7, "num_key_value_heads": 7, "norm_topk_prob": False},
        601,
    ),
}


@dataclass
class Oracle:
    """A checkpoint folder and the ``transformers`` model (float32) that wrote it."""

    folder: Path
    model: Any
    seen: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @property
    def index_topk(self) -> int | None:
        """None if the model selects nothing."""
        return getattr(self.model.config, "index_topk", None)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 ``[len, vocab]``; computed once for the same tokens."""
        if tuple(ids) not in self.seen:
            self.seen[tuple(ids)] = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
        return self.seen[tuple(ids)]

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()


def make_ids(length: int, vocab: int = 200, seed: int = 0) -> list[int]:
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
                # A layer adds little to the residual, as in a trained model: a near tie changes a single row.
                gain = 0.3 if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else 1.5
                tensor.normal_(std=1.0 if "embed" in name else gain * tensor.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                tensor.normal_(std=0.1)
            else:
                tensor.normal_(mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return Oracle(folder, model)


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


def in_float64(model: Any) -> Any:
    """A copy of a model of ``transformers`` that computes in float64, but for the router and the indexer's scores; for
    these see :func:`index_vectors`."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # the grouped product knows no float64
    for part in wide.modules():
        if type(part).__name__.endswith("RMSNorm"):  # which computes in float32 whatever it is given
            part.forward = types.MethodType(_rms_norm, part)
    return wide


def index_vectors(
    indexer: Any, x: torch.Tensor, q_resid: torch.Tensor, turns: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries ``[L, heads, dim]``, keys ``[L, dim]`` and head weights ``[L, heads]`` of a float64 indexer of
    ``transformers``, by the definition, from the arguments of its ``forward`` for one sequence."""

    def rotated(v: torch.Tensor) -> torch.Tensor:  # [L, heads, dim]
        half = indexer.qk_rope_head_dim // 2
        cos, sin = (t[0, :, None, :half] for t in turns)
        a, b, rest = v[..., :half], v[..., half : 2 * half], v[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)

    q = rotated(indexer.wq_b(q_resid[0]).unflatten(-1, (indexer.n_heads, indexer.head_dim)))
    k = rotated(indexer.k_norm(indexer.wk(x[0]))[:, None])[:, 0]
    return q, k, indexer.weights_proj(x[0]) * indexer.n_heads**-0.5 * indexer.head_dim**-0.5


def check_logits(
    ours: torch.Tensor, theirs: torch.Tensor, *, index_topk: int | None = None, first: int = 0, what: str = ""
) -> None:
    """The rule for logits ``[rows, vocab]``: relative error under 1e-4 in every row, near ties of a selection aside.

    The error of a row is its largest difference over its largest logit. Rows at positions below ``index_topk`` depend
    on no selection, and all must pass. Above, rounding may swap the last selected token at a near tie (it does so
    between ``transformers`` in float32 and in float64 too): under 1% of the rows may, and the error of the whole stays
    small.

    Args:
        index_topk: the model's; None if it selects nothing.
        first: position of the first row.
    """
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert bool(torch.isfinite(ours).all())
    difference = (ours - theirs).abs()
    error = difference.amax(dim=-1) / theirs.abs().amax(dim=-1)
    sure = len(error) if index_topk is None else max(0, index_topk - first)
    over = float((error > 1e-4).float().mean())
    whole = float(difference.norm() / theirs.norm())
    median = float(error.median())
    print(f"logits {what}: max {float(error.max()):.1e}, median {median:.1e}, over 1e-4 {over:.2%}, whole {whole:.1e}")
    assert sure == 0 or float(error[:sure].max()) < 1e-4
    assert median < 1e-5
    assert over < 0.01
    assert whole < 1e-3
