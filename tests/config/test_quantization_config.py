"""Which weights a ``quantization_config`` says are stored how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.config.keys import Keys
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig, WeightScheme
from dsa_engine.config.released import released_config
from dsa_engine.model.layout import released_tensors

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT8: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "output_activations": None,
}
INT4: dict[str, Any] = {
    "targets": ["re:.*mlp\\.experts\\..*"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "input_activations": None,
}


def read(config: dict[str, Any] | None) -> QuantizationConfig | None:
    return QuantizationConfig.from_keys(Keys({"quantization_config": config}))


def compressed(*groups: dict[str, Any], **keys: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": named} | keys


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v3", "glm_moe_dsa"])
def test_the_released_format_names_what_the_released_layout_quantises(name: str) -> None:
    config = ModelConfig.from_dict(released_config(name), {"num_hidden_layers": 4, "n_routed_experts": 32})
    assert config.quantization is not None and config.weight_block_size == (128, 128)
    everything = released_tensors(config, fp8=True)
    for spec in (spec for spec in everything if len(spec.shape) == 2 and not spec.name.endswith("_scale_inv")):
        scheme = config.quantization.scheme_of(spec.name)
        assert (scheme is not None) == spec.quantized, spec.name
    assert scheme is None  # lm_head
    (only,) = config.quantization.schemes
    assert only.power_of_two == (name == "deepseek_v32") and only.activation_bits == 8


def test_modules_that_are_not_converted() -> None:
    names = ["model.layers.1.mlp.down_proj", "model.layers.2", "re:.*\\.wk$"]
    config = read(FP8 | {"modules_to_not_convert": names})
    assert config is not None
    stored = {
        "model.layers.1.mlp.down_proj.weight": False,
        "model.layers.1.mlp.up_proj.weight": True,
        "model.layers.2.self_attn.o_proj.weight": False,
        "model.layers.20.self_attn.o_proj.weight": True,
        "model.layers.3.self_attn.indexer.wk.weight": False,
        "model.layers.3.self_attn.indexer.wq_b.weight": True,
    }
    assert {name: config.scheme_of(name) is not None for name in stored} == stored


def test_groups_of_compressed_tensors() -> None:
    config = read(compressed(INT4 | {"format": "pack-quantized"}, INT8, ignore=["lm_head", "re:.*mlp.gate$"]))
    assert config is not None and config.weight_block_size is None
    int4 = WeightScheme("int", 4, "group", group_size=128, layout="pack-quantized")
    int8 = WeightScheme("int", 8, "channel", activation_bits=8, layout="int-quantized")
    assert config.schemes == (int4, int8)
    assert config.scheme_of("model.layers.1.mlp.experts.3.up_proj.weight") == int4
    assert config.scheme_of("model.layers.1.mlp.shared_experts.up_proj.weight") == int8
    assert config.scheme_of("model.layers.1.mlp.gate.weight") is None
    assert config.scheme_of("lm_head.weight") is None
    assert "int4 in groups of 128 with plain activations" in int4.name


def changed(group: dict[str, Any], part: str, **keys: Any) -> dict[str, Any]:
    return compressed(group | {part: (group[part] or {}) | keys})


@pytest.mark.parametrize(
    "config, named",
    [
        ({"quant_method": "awq"}, "'awq'"),
        (FP8 | {"scale_fmt": "e5m2"}, "scale_fmt 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (FP8 | {"weight_block_size": [128, 0]}, r"weight_block_size .*\[128, 0\]"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert .*'lm_head'"),
        (FP8 | {"of_tomorrow": 1}, "quantization_config.of_tomorrow 1"),
        (FP8 | {"dequantize": True}, "quantization_config.dequantize True"),
        (FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert .*'embed_tokens'"),
        (compressed(), "config_groups"),
        (compressed() | {"config_groups": {"group_0": 1}}, "config_groups.group_0 .* 1"),
        (compressed(INT8 | {"targets": []}), "group_0.targets"),
        (compressed(INT8 | {"weights": None}), "group_0.weights"),
        (compressed(INT8 | {"of_tomorrow": 1}), "config_groups.group_0.of_tomorrow 1"),
        (compressed(INT8, ignore=["re:*"]), r"ignore: 're:\*'"),
        (compressed(INT8, of_tomorrow={"a": 1}), "quantization_config.of_tomorrow {'a': 1}"),
        (compressed(INT8, transform_config={"config_groups": {"R1": {}}}), "transform_config {.*R1"),
        (compressed(INT8, sparsity_config={"format": "sparse-bitmask"}), "sparsity_config .*sparse-bitmask"),
        (compressed(INT8, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme {'num_bits': 8}"),
        (changed(INT8, "weights", num_bits="8"), "num_bits .*'8'"),
        (changed(INT8, "weights", strategy="row"), "strategy 'row'"),
        (changed(INT8, "weights", dynamic=True), "group_0.weights.dynamic"),
        (changed(INT8, "weights", of_tomorrow=1), "group_0.weights.of_tomorrow 1"),
        (changed(INT8, "weights", group_size=128), "group_0.weights.group_size 128"),
        (changed(INT8, "weights", actorder="group"), "weights.actorder 'group' .* 'channel'"),
        (changed(INT4, "weights", group_size=None), "lacks 'group_size'"),
        (changed(INT4, "weights", actorder="rows"), "weights.actorder 'rows'"),
        (changed(INT4, "weights", block_structure=[1, 1]), r"weights.block_structure \[1, 1\]"),
        (changed(INT8, "input_activations", dynamic=False), "input_activations.dynamic"),
        (changed(INT8, "input_activations", strategy=None), "input_activations.strategy 'tensor'"),
        (changed(INT8, "input_activations", symmetric=False), "input_activations.symmetric"),
        (changed(INT8, "input_activations", group_size=128), "input_activations.group_size 128"),
        (changed(INT8, "input_activations", actorder="group"), "input_activations.actorder 'group'"),
        (changed(INT8, "output_activations", num_bits=8), "output_activations"),
    ],
)
def test_what_is_not_possible_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(config)


def test_keys_that_change_nothing() -> None:
    """As the library, ``transformers`` and their older versions write them."""
    fp8 = {"dequantize": False, "expert_dtype": "fp8", "modules_to_convert": None, "scale_fmt": "float", "later": None}
    assert read(FP8 | fp8) == read(FP8)
    assert read(FP8 | {"ignored_layers": ["a"]}) == read(FP8 | {"modules_to_not_convert": ["a"]}) != read(FP8)
    arguments = {"observer": "mse", "observer_kwargs": {"a": 1}, "scale_dtype": None, "zp_dtype": "torch.int8"}
    weights = INT8["weights"] | arguments | {"group_size": -1, "block_structure": None, "actorder": None}
    inputs = INT8["input_activations"] | arguments | {"group_size": None, "symmetric": True, "actorder": False}
    about = {"quantization_status": "frozen", "global_compression_ratio": 1.2, "version": "0.9", "run_compressed": True}
    empty = {"kv_cache_scheme": None, "transform_config": {}, "moe_sparsity_config": None}
    group = INT8 | {"weights": weights, "input_activations": inputs}
    for sparsity in (None, {}, {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}):
        assert read(compressed(group, sparsity_config=sparsity, **about, **empty)) == read(compressed(INT8))


def test_how_columns_are_ordered() -> None:
    for order in ("group", "dynamic", "GROUP", True):
        (scheme,) = read(changed(INT4, "weights", actorder=order)).schemes  # type: ignore[union-attr]
        assert scheme.actorder == "group" and "in groups of 128, in any order" in scheme.name
    for order in ("weight", "static", None, False):  # the codes are stored in order
        assert read(changed(INT4, "weights", actorder=order)) == read(compressed(INT4))
    del (weights := dict(INT4["weights"]))["strategy"]
    assert read(compressed(INT4 | {"weights": weights})) == read(compressed(INT4)), "a size makes groups"


def test_the_demo_model_is_in_the_released_format() -> None:
    path = Path(__file__).resolve().parents[2] / "dsa_engine" / "demo_model" / "config.json"
    config = ModelConfig.from_dict(json.loads(path.read_text()))
    assert config.quantization is not None and config.quantization.schemes[0].power_of_two
