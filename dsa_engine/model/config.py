"""The model's configuration, read from a Hugging Face ``config.json``.

One frozen dataclass describes all three model types; what is not supported is refused here, by name, so that no other
file has to ask. Field names are those of ``config.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsa_engine.errors import CheckpointError
from dsa_engine.model.rope import RopeConfig

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa", "deepseek_v3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The norms on the two low-rank latents, and the indexer's LayerNorm, have their own epsilon in every released model.
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
    weight_block_size: tuple[int, int] | None  # FP8 checkpoints: rows and columns that share one scale

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached latent row: the compressed K/V and the shared RoPE key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5 * self.rope.softmax_mscale**2

    @property
    def has_indexer(self) -> bool:
        return self.index_topk > 0

    @classmethod
    def from_pretrained(cls, folder: str | Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
        """Reads ``folder/config.json``.

        Args:
            folder: a Hugging Face model folder.
            overrides: keys that replace those of the file; nested dictionaries are merged.

        Raises:
            CheckpointError: no such folder, no ``config.json`` in it, or not JSON.
            ValueError: the configuration is not supported or contradicts itself.
        """
        raw = read_config_json(folder)
        generation = Path(folder) / "generation_config.json"
        if generation.is_file():  # it may name more tokens that end a text, as chat models do
            ends = _as_list(raw.get("eos_token_id")) + _as_list(_read_object(generation).get("eos_token_id"))
            raw["eos_token_id"] = list(dict.fromkeys(ends))
        return cls.from_dict(raw, overrides)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], overrides: dict[str, Any] | None = None) -> ModelConfig:
        """Builds the configuration from the keys of a ``config.json``; see :meth:`from_pretrained`."""
        raw = _without_aliases(raw, overrides or {})
        raw = merge_overrides(raw, overrides or {})
        get = _Keys(raw)
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {model_type!r} is not supported; supported are {', '.join(MODEL_TYPES)}")
        _refuse_unsupported(raw)

        layers = get.size("num_hidden_layers")
        has_indexer = model_type != "deepseek_v3"
        rope_dim = get.size("qk_rope_head_dim")
        max_positions = get.size("max_position_embeddings")
        quantization = raw.get("quantization_config")
        config = cls(
            model_type=model_type,
            vocab_size=get.size("vocab_size"),
            hidden_size=get.size("hidden_size"),
            num_hidden_layers=layers,
            max_position_embeddings=max_positions,
            rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
            dtype=_dtype(raw),
            eos_token_ids=tuple(_as_list(raw.get("eos_token_id"))),
            tie_word_embeddings=bool(get("tie_word_embeddings", False)),
            num_attention_heads=get.size("num_attention_heads"),
            q_lora_rank=get.size("q_lora_rank"),
            kv_lora_rank=get.size("kv_lora_rank"),
            qk_nope_head_dim=get.size("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=get.size("v_head_dim"),
            rope=RopeConfig.from_dict(raw, rope_dim, max_positions),
            rope_interleaved=bool(get("rope_interleave", True)),
            index_topk=get.size("index_topk") if has_indexer else 0,
            index_n_heads=get.size("index_n_heads") if has_indexer else 0,
            index_head_dim=get.size("index_head_dim") if has_indexer else 0,
            # DeepSeek-V3.2 rotates halves in the indexer, GLM-5 rotates pairs there as in the main attention.
            index_rope_interleaved=bool(get("indexer_rope_interleave", model_type == "glm_moe_dsa")),
            indexer_types=_indexer_types(raw, layers) if has_indexer else ("none",) * layers,
            intermediate_size=get.size("intermediate_size"),
            mlp_layer_types=_mlp_layer_types(raw, layers),
            moe_intermediate_size=get.size("moe_intermediate_size"),
            n_routed_experts=get.size("n_routed_experts"),
            n_shared_experts=get.size("n_shared_experts"),
            num_experts_per_tok=get.size("num_experts_per_tok"),
            n_group=get.size("n_group"),
            topk_group=get.size("topk_group"),
            norm_topk_prob=bool(get("norm_topk_prob", True)),
            routed_scaling_factor=float(get("routed_scaling_factor")),
            num_nextn_predict_layers=int(get("num_nextn_predict_layers", 0)),
            weight_block_size=_weight_block_size(quantization),
        )
        config._check()
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
        need(groups == 1 or experts // groups >= 2, "a group must have at least 2 experts")
        need(self.topk_group <= groups, f"topk_group {self.topk_group} must not exceed n_group {groups}")
        need(
            self.num_experts_per_tok <= experts // groups * self.topk_group,
            f"num_experts_per_tok {self.num_experts_per_tok} must not exceed the experts of {self.topk_group} groups",
        )


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The raw keys of ``folder/config.json``; raises :class:`CheckpointError` where there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"no such model folder: {folder} (give a Hugging Face folder, or 'demo')")
    path = folder / "config.json"
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise CheckpointError(f"{folder} is no checkpoint: it has no config.json (it holds {found})")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


class _Keys:
    """Reads keys with a clear error for those that are missing or of the wrong kind."""

    def __init__(self, raw: dict[str, Any]):
        self.raw = raw

    def __call__(self, key: str, *default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default:
            return default[0]
        raise ValueError(f"config.json lacks {key!r}, which a {self.raw['model_type']} model needs")

    def size(self, key: str) -> int:
        value = self(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key!r} must be a positive integer, not {value!r}")
        return value


def merge_overrides(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the keys of ``overrides`` in place of its own; nested dictionaries are merged."""
    merged = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_overrides(merged[key], value) if nested else value
    return merged


# The same thing under several names: an override of one takes the others' place, also where they would go before it.
_ALIASES: tuple[set[str], ...] = (
    {"dtype", "torch_dtype"},
    {"mlp_layer_types", "first_k_dense_replace"},
    {"rope_parameters", "rope_scaling"},
)
_INDEXER_SCHEDULES = ("indexer_types", "index_topk_pattern", "index_topk_freq")  # the earlier goes before the later


def _without_aliases(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``raw`` without what the overrides say under another name."""
    gone = {name for names in _ALIASES if names & overrides.keys() for name in names - overrides.keys()}
    for i, name in enumerate(_INDEXER_SCHEDULES):
        if name in overrides:
            gone |= set(_INDEXER_SCHEDULES[:i]) - overrides.keys()
    kept = {key: value for key, value in raw.items() if key not in gone}
    theta = (raw.get("rope_parameters") or {}).get("rope_theta")
    if "rope_theta" in overrides and "rope_parameters" in kept:
        kept["rope_parameters"] = {k: v for k, v in (kept["rope_parameters"] or {}).items() if k != "rope_theta"}
    elif "rope_parameters" in gone and theta is not None:
        kept.setdefault("rope_theta", theta)  # it is no part of rope_scaling
    return kept


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    only: dict[str, Any] = {
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    for key, supported in only.items():
        if raw.get(key) is not None and raw[key] != supported:
            raise ValueError(f"{key} = {raw[key]!r} is not supported; supported is {supported!r}")
    if "q_lora_rank" in raw and raw["q_lora_rank"] is None:
        raise ValueError("q_lora_rank = null (a full-rank q_proj) is not supported; give the rank of q_a_proj")
    for key, kind in (("quantization_config", dict), ("rope_scaling", dict), ("rope_parameters", dict)):
        if raw.get(key) is not None and not isinstance(raw[key], kind):
            raise ValueError(f"{key} must be a JSON object, not {raw[key]!r}")
    quantization = raw.get("quantization_config")
    if quantization is not None and (quantization.get("quant_method"), quantization.get("fmt", "e4m3")) != (
        "fp8",
        "e4m3",
    ):
        raise ValueError(
            f"quantization_config {quantization.get('quant_method')!r}/{quantization.get('fmt')!r} is not supported; "
            "supported is quant_method 'fp8' with fmt 'e4m3' and weight_block_size"
        )


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def _weight_block_size(quantization: dict[str, Any] | None) -> tuple[int, int] | None:
    if quantization is None:
        return None
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        raise ValueError(f"quantization_config.weight_block_size must be [rows, columns], not {block!r}")
    return block[0], block[1]


def _per_layer(raw: dict[str, Any], key: str, layers: int, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """A per-layer list, cut to ``layers`` so that an override of ``num_hidden_layers`` keeps the first ones."""
    values = raw[key]
    if not isinstance(values, list):
        raise ValueError(f"{key} must be a list with one of {', '.join(allowed)} for each layer, not {values!r}")
    if len(values) < layers:
        raise ValueError(f"{key} names {len(values)} layers, num_hidden_layers is {layers}")
    for value in values:
        if value not in allowed:
            raise ValueError(f"{key}: {value!r} is not supported; supported are {', '.join(allowed)}")
    return tuple(values[:layers])


def _mlp_layer_types(raw: dict[str, Any], layers: int) -> tuple[str, ...]:
    if raw.get("mlp_layer_types") is not None:
        return _per_layer(raw, "mlp_layer_types", layers, ("dense", "sparse"))
    dense = min(int(raw.get("first_k_dense_replace") or 0), layers)
    return ("dense",) * dense + ("sparse",) * (layers - dense)


def _indexer_types(raw: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Which layers select for themselves; GLM-5 gives a list, a pattern ("FSSF…") or a frequency with an offset."""
    if raw.get("indexer_types") is not None:
        return _per_layer(raw, "indexer_types", layers, ("full", "shared"))
    pattern = raw.get("index_topk_pattern")
    if pattern is not None:
        letters = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        return _per_layer(
            {"index_topk_pattern": [letters.get(c, c) for c in pattern]},
            "index_topk_pattern",
            layers,
            ("full", "shared"),
        )
    every = max(int(raw.get("index_topk_freq") or 1), 1)
    offset = int(raw.get("index_skip_topk_offset", 2))
    return tuple("full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers))
