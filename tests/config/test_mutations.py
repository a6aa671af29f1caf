"""Every value of every key of a ``config.json`` is checked: a wrong one is refused by the name of its key, and one that
is accepted counts, or is known to mean nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from dsa_engine.config.model import ModelConfig
from dsa_engine.errors import CheckpointError
from small_config import SMALL

PLAIN: dict[str, Any] = SMALL | {
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "indexer_rope_interleave": False,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "rope_theta": 1e4,
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.5,
        "truncate": True,
    },
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
    "dequantize": False,
    "expert_dtype": "fp8",
}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "dynamic": False,
    "actorder": "group",
    "observer": "minmax",
    "observer_kwargs": {},
    "block_structure": None,
    "scale_dtype": None,
}
INPUTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
    "group_size": None,
    "actorder": None,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": 1.5,
    "version": "0.12",
    "ignore": ["lm_head", "re:.*gate$"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
    "moe_sparsity_config": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": WEIGHTS,
            "input_activations": INPUTS,
            "output_activations": None,
            "format": "pack-quantized",
        }
    },
    "of_tomorrow": None,
}
NEW = {key: value for key, value in PLAIN.items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")} | {
    "dtype": "bfloat16",
    "rope_parameters": PLAIN["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 5000.0},
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_topk_pattern": "FSFS",
}
LISTED = {"indexer_types": ["full", "shared", "full", "shared"], "rope_parameters": {"rope_theta": 5e3}}
# A configuration, and its part that is changed.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": (PLAIN, ()),
    "fp8": (PLAIN | {"quantization_config": FP8}, ("quantization_config",)),
    "compressed": (PLAIN | {"quantization_config": COMPRESSED}, ("quantization_config",)),
    "new": (NEW, ("rope_parameters", "dtype", "mlp_layer_types", "index_topk_pattern", "first_k_dense_replace")),
    "listed": (PLAIN | LISTED, ("indexer_types", "rope_parameters", "rope_scaling")),
}

# Values that a damaged or hostile file may hold.
DEEP: Any = 1
for _ in range(3000):
    DEEP = {"a": DEEP}
VALUES: list[Any] = [
    *(None, 0, -1, 1, 3, 2.5, -0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan, 2**31, 2**62, -(2**62), 10**5000),
    *("", "false", "64", "yarn", "default", "null", "group", "\ud800", "x" * 5000, "re:(", True, False),
    *([], [1], [None], ["full"], ["re:(.*)*("], ["re:" + "(" * 2000], [128, 0], {}, {"a": 1}, {"factor": 4}, DEEP),
]

ANY_TEXT = ("", "false", "64", "yarn", "default", "null", "group", "\ud800", "x" * 5000, "re:(")
# Values that are accepted and change nothing, besides null, which is the default of each key.
MEANS_NOTHING: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),  # all heads share one latent row
    "index_topk_freq": (0, 3),  # 0 as 1, in `transformers` too; and the layers of the first 3 are full in any case
    "index_skip_topk_offset": (0, 1, 3),  # every layer is full
    "first_k_dense_replace": (0, 3),  # mlp_layer_types counts
    "mscale": (0, 3, 2.5, 1e-300, 1),  # attention_factor counts
    "rope_scaling": ({}, {"a": 1}, {"factor": 4}),
    "type": ("default",),  # rope_type, where there is one, counts, as in `transformers`
    "group_size": (-1,),  # activations have no groups, as with null
    "eos_token_id": ([1],),  # as 1
    "actorder": (True, False),  # as "group", and as null
    "format": ANY_TEXT,  # that of the group counts
    "global_compression_ratio": (0, -1, 1, 3, 2.5, -0.5, 1e-300, 1e300, 2**31, 2**62, -(2**62)),
    "version": ANY_TEXT,
    "observer": ANY_TEXT,  # how the weights were calibrated
    "observer_kwargs": ({"a": 1}, {"factor": 4}, DEEP),
    "scale_dtype": ANY_TEXT,  # the file has its dtype
    "kv_cache_scheme": ({},),
    "moe_sparsity_config": ({},),
    "output_activations": ({},),
}


def paths(keys: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in keys.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def with_value(keys: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    head, *rest = path
    return keys | {head: with_value(keys[head], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_value_is_checked(name: str) -> None:
    base, changed = VARIANTS[name]
    before = ModelConfig.from_dict(base)
    for path in paths(base):
        if changed and path[0] not in changed:
            continue
        for value in VALUES:
            try:
                config = ModelConfig.from_dict(with_value(base, path, value))
            except ValueError as error:
                text = str(error)
                assert type(error) in (ValueError, CheckpointError), (path, text)
                assert path[-1] in text and len(text) < 500, (path, text)
                continue
            check_sound(config)
            if config == before and value is not None:
                old = base
                for key in path:
                    old = old[key]
                neutral = MEANS_NOTHING.get(path[-1], ())
                assert any(type(value) is type(one) and value == one for one in neutral) or value == old, (path, value)


def check_sound(config: ModelConfig) -> None:
    for field in fields(config):
        number = getattr(config, field.name)
        if isinstance(number, (int, float)):
            assert math.isfinite(number) and type(number).__name__ == field.type, field.name
    assert config.rope.inverse_frequencies().isfinite().all()
    assert math.isfinite(config.softmax_scale) and config.softmax_scale > 0
