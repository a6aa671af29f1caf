"""The model's configuration, read from a Hugging Face ``config.json``.

One frozen dataclass describes all three model types. Unsupported features are refused here, by name, so that no other
file has to check. Field names are those of ``config.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsa_engine.config.checks import DTYPE_NAMES, shown
from dsa_engine.config.keys import Keys
from dsa_engine.config.overrides import overridden, refuse_unknown
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.config.rope import RopeConfig
from dsa_engine.errors import CheckpointError

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v3")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}

# Fields that are an integer of config.json in every model type.
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "num_attention_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size"),
    *("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
)

# Epsilon of the norms on the two low-rank latents and of the indexer's LayerNorm, in every released model.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a DeepSeek-style model with latent attention (MLA).

    ``index_topk == 0`` means that the model has no indexer (DeepSeek-V3/R1: dense attention in every layer).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    dtype: torch.dtype  # the checkpoint's activation dtype
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool
    # attention
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig
    rope_interleaved: bool  # pairs (2i, 2i+1); otherwise (i, i + dim/2)
    # indexer
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    index_rope_interleaved: bool
    indexer_types: tuple[str, ...]  # per layer: "full" selects, "shared" reuses the last selection, "none"
    index_share_for_mtp_iteration: bool  # later passes of an MTP module reuse the selection of its first
    # feed-forward
    intermediate_size: int
    mlp_layer_types: tuple[str, ...]  # per layer: "dense" or "sparse"
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    # checkpoint
    num_nextn_predict_layers: int
    quantization: QuantizationConfig | None  # storage of linear weights; None: plain numbers
    # not of the checkpoint: the option
    batch_invariant: bool = False

    @property
    def weight_block_size(self) -> tuple[int, int] | None:
        """Rows and columns that share one scale in FP8 checkpoints."""
        return self.quantization.weight_block_size if self.quantization else None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached latent row: compressed K/V and shared RoPE key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.softmax_mscale**2

    @property
    def has_indexer(self) -> bool:
        return self.index_topk > 0

    def with_mtp(self, modules: int) -> ModelConfig:
        """A copy with the layers of ``modules`` MTP modules appended to ``mlp_layer_types`` and ``indexer_types``; each
        of these layers has an indexer if the model has any."""
        return replace(
            self,
            mlp_layer_types=(*self.mlp_layer_types, *("sparse",) * modules),
            indexer_types=(*self.indexer_types, *("full" if self.has_indexer else "none",) * modules),
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
        """Reads ``folder/config.json``; ``overrides`` replace its keys, and nested dictionaries are merged.

        Raises:
            CheckpointError: no such folder, no ``config.json`` in it, or not JSON.
            ValueError: the configuration is not supported or contradicts itself.
        """
        raw = read_config_json(folder)
        generation = Path(folder) / "generation_config.json"
        if generation.is_file():  # it may name further end tokens, as for chat models
            end_tokens = [*_as_list(raw.get("eos_token_id")), *_as_list(read_object(generation).get("eos_token_id"))]
            raw["eos_token_id"] = [token for i, token in enumerate(end_tokens) if token not in end_tokens[:i]]
        return cls.from_dict(raw, overrides)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
        """Builds the configuration from the keys of a ``config.json``; see :meth:`from_pretrained`."""
        overrides = overrides or {}
        keys = Keys(overridden(raw, overrides))
        model_type = keys.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {shown(model_type)} is not supported; supported are {', '.join(MODEL_TYPES)}")
        _refuse_unsupported(keys)

        has_indexer = model_type != "deepseek_v3"
        indexer = ("index_topk", "index_n_heads", "index_head_dim")
        sizes: dict[str, Any] = {name: keys.size(name) for name in _SIZES + (indexer if has_indexer else ())}
        layers = sizes["num_hidden_layers"]
        config = cls(
            **dict.fromkeys(indexer, 0) | sizes,
            model_type=model_type,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            dtype=_dtype(keys),
            eos_token_ids=keys.token_ids("eos_token_id", sizes["vocab_size"]),
            tie_word_embeddings=keys.flag("tie_word_embeddings", False),
            rope=RopeConfig.from_keys(keys, sizes["qk_rope_head_dim"], sizes["max_position_embeddings"]),
            rope_interleaved=keys.flag("rope_interleave", True),
            # DeepSeek-V3.2 rotates halves in the indexer, GLM-5 rotates pairs there as in the main attention.
            index_rope_interleaved=keys.flag("indexer_rope_interleave", model_type == "glm_moe_dsa"),
            indexer_types=_indexer_types(keys, layers) if has_indexer else ("none",) * layers,
            index_share_for_mtp_iteration=keys.flag("index_share_for_mtp_iteration", False) and has_indexer,
            mlp_layer_types=_mlp_layer_types(keys, layers),
            norm_topk_prob=keys.flag("norm_topk_prob", True),
            routed_scaling_factor=keys.number("routed_scaling_factor"),
            num_nextn_predict_layers=keys.size("num_nextn_predict_layers", 0, minimum=0),
            quantization=QuantizationConfig.from_keys(keys),
        )
        config._check()
        refuse_unknown(overrides, keys.asked | raw.keys())
        return config

    def _check(self) -> None:
        def need(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(f"config.json contradicts itself: {message}")

        need(self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim {self.qk_rope_head_dim} must be even")
        if self.has_indexer:
            need(
                self.index_head_dim >= self.qk_rope_head_dim,
                f"index_head_dim {self.index_head_dim} must be at least qk_rope_head_dim {self.qk_rope_head_dim}",
            )
            need(self.indexer_types[0] == "full", "indexer_types[0] must be 'full': there is no selection to share yet")
        experts, groups = self.n_routed_experts, self.n_group
        need(experts % groups == 0, f"n_group {groups} must divide n_routed_experts {experts}")
        need(
            groups == 1 or experts // groups >= 2,
            f"n_group {groups} of n_routed_experts {experts}: a group must have at least 2 experts",
        )
        need(self.topk_group <= groups, f"topk_group {self.topk_group} must not exceed n_group {groups}")
        need(
            self.num_experts_per_tok <= experts // groups * self.topk_group,
            f"num_experts_per_tok {self.num_experts_per_tok} must not exceed the experts of {self.topk_group} groups "
            f"(topk_group; n_group {groups} of n_routed_experts {experts})",
        )


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The raw keys of ``folder/config.json``; raises :class:`CheckpointError` if there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"no such model folder: {folder} (give a Hugging Face folder, or 'demo')")
    path = folder / "config.json"
    if not path.is_file():
        content = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"{folder} is no checkpoint: it has no config.json (it holds {content})")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises :class:`CheckpointError` if there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _refuse_unsupported(keys: Keys) -> None:
    only: dict[str, Any] = {
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    for key, supported in only.items():
        value = keys.get(key)
        if value is not None and (type(value) is not type(supported) or value != supported):
            raise ValueError(f"{key} = {shown(value)} is not supported; supported is {supported!r}")
    keys.size("num_key_value_heads", 1)  # means nothing here: all heads share one latent row
    if "q_lora_rank" in keys.raw and keys.raw["q_lora_rank"] is None:
        raise ValueError("q_lora_rank = null (a full-rank q_proj) is not supported; give the rank of q_a_proj")


def _dtype(keys: Keys) -> torch.dtype:
    given = {key: keys.get(key) for key in ("dtype", "torch_dtype") if keys.get(key) is not None}  # the new name first
    for key, name in given.items():
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"{key} {shown(name)} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[next(iter(given.values()), "bfloat16")]


def _mlp_layer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    dense = min(keys.size("first_k_dense_replace", 0, minimum=0), layers)
    if keys.get("mlp_layer_types") is not None:
        return keys.per_layer("mlp_layer_types", layers, ("dense", "sparse"))
    return ("dense",) * dense + ("sparse",) * (layers - dense)


def _indexer_types(keys: Keys, layers: int) -> tuple[str, ...]:
    """The layers that have an indexer; GLM-5 gives a list, a pattern ("FSSF…") or a frequency with an offset."""
    every = max(keys.size("index_topk_freq", 1, minimum=0), 1)
    offset = keys.size("index_skip_topk_offset", 2, minimum=0)
    if keys.get("indexer_types") is not None:
        return keys.per_layer("indexer_types", layers, ("full", "shared"))
    if keys.get("index_topk_pattern") is not None:
        letters = {"F": "full", "S": "shared"}
        pattern = keys.per_layer("index_topk_pattern", layers, ("F", "S", "full", "shared"))
        return tuple(letters.get(letter, letter) for letter in pattern)
    return tuple("full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers))
