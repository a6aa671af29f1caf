"""The configuration and RoPE, against ``transformers``' reading of the same keys; everything unsupported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.config.model import ModelConfig, read_config_json
from dsa_engine.config.released import RELEASED_CONFIGS, released_config
from dsa_engine.errors import CheckpointError
from small_config import SMALL

YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 512}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({k: v for k, v in (SMALL | changes).items() if v is not ...})


@pytest.mark.parametrize("name", sorted(RELEASED_CONFIGS))
def test_released_configurations(name: str) -> None:
    config = ModelConfig.from_dict(released_config(name))
    assert config.kv_lora_rank == 512 and config.latent_dim == 576
    assert len(config.indexer_types) == len(config.mlp_layer_types) == config.num_hidden_layers
    assert config.mlp_layer_types[:4] == ("dense", "dense", "dense", "sparse")
    assert config.has_indexer == (config.index_topk == 2048) == (config.model_type != "deepseek_v3")
    assert config.n_routed_experts == 256 and config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        YARN,
        YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
        YARN | {"mscale": 0.707},
        YARN | {"mscale_all_dim": 0.5},
        YARN | {"attention_factor": 1.25},
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        YARN | {"factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0},
        YARN | {"factor": 1.0},
    ],
)
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "deepseek_v3"])
def test_rope_equals_that_of_transformers(model_type: str, rope: dict[str, Any]) -> None:
    """Cosines and sines at near and far positions, and the softmax scale, of the very modules that the oracle runs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = SMALL | {"model_type": model_type, "rope_parameters": rope, "qk_rope_head_dim": 16, "index_head_dim": 20}
    theirs = AutoConfig.for_model(**keys, num_key_value_heads=3)
    model = AutoModelForCausalLM.from_config(theirs)
    config = ModelConfig.from_dict(keys)
    positions = torch.tensor([0, 1, 17, 511, 512, 5000, 100_000, 163_839, 1_048_575])
    cos, sin = config.rope.cos_sin(positions)
    with torch.no_grad():
        expected = model.model.rotary_emb(torch.zeros(1, 1, 1), positions[None])
    for ours, reference in zip((cos, sin), expected, strict=True):
        half = reference[0, :, : reference.shape[-1] // 2] if reference.shape[-1] == 16 else reference[0]
        torch.testing.assert_close(ours, half, rtol=1e-5, atol=1e-5)
    attention = model.model.layers[0].self_attn
    scale = getattr(attention, "scaling", None) or attention.softmax_scale
    assert config.softmax_scale == pytest.approx(scale, rel=1e-6)


def test_old_and_new_keys_mean_the_same() -> None:
    yarn = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    old = read(rope_theta=7000, rope_scaling=yarn | {"type": "yarn"}, torch_dtype="float16")
    new = read(rope_parameters=yarn | {"rope_type": "yarn", "rope_theta": 7000}, dtype="float16")
    assert old == new and old.rope.theta == 7000 and old.rope.factor == 40 and old.dtype == torch.float16
    assert old == read(rope_theta=7000, rope_scaling=yarn | {"rope_type": "yarn", "type": None}, dtype="float16")
    plain = {"rope_type": "default", "factor": 40, "partial_rotary_factor": 1.0, "beta_slow": None}
    assert read(rope_parameters=plain) == read(rope_scaling={}) == read(rope_scaling={"factor": None})
    assert read(rope_theta=7000, rope_scaling=None) == read(
        rope_parameters={"rope_type": "default", "rope_theta": 7000}
    )
    # Where both are there, as transformers writes them for old readers, the new ones count.
    assert read(rope_theta=1, rope_parameters={"rope_type": "default", "rope_theta": 7000}).rope.theta == 7000


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
        {"index_topk_pattern": "FSFSSF"},
        {"index_topk_pattern": ["full", "shared", "full", "shared", "shared", "full"]},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"index_topk_freq": 0},
    ],
)
def test_which_layers_select(keys: dict[str, Any]) -> None:
    """GLM-5's schedules, as ``transformers`` derives them."""
    from transformers import AutoConfig

    raw = SMALL | {"model_type": "glm_moe_dsa", "num_hidden_layers": 6} | keys
    assert list(ModelConfig.from_dict(raw).indexer_types) == AutoConfig.for_model(**raw).indexer_types


def test_overrides_replace_and_merge() -> None:
    raw = SMALL | {"rope_parameters": YARN}
    config = ModelConfig.from_dict(raw, {"num_hidden_layers": 2, "rope_parameters": {"factor": 8.0}})
    assert config.num_hidden_layers == len(config.mlp_layer_types) == 2
    assert (config.rope.factor, config.rope.theta) == (8.0, 5000.0)
    assert raw["rope_parameters"]["factor"] == 4.0, "the caller's dictionary was changed"
    listed = SMALL | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
    assert ModelConfig.from_dict(listed, {"num_hidden_layers": 3}).mlp_layer_types == ("dense", "sparse", "dense")


def test_end_tokens() -> None:
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read(eos_token_id=[5, 7]).eos_token_ids == (5, 7)
    assert read(eos_token_id=None).eos_token_ids == read().eos_token_ids == ()
    assert read(eos_token_id=0).eos_token_ids == (0,)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"model_type": ...}, "model_type None"),
        ({"hidden_size": ...}, "lacks 'hidden_size'"),
        ({"index_topk": ...}, "lacks 'index_topk'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' .* 0"),
        ({"vocab_size": "64"}, "'vocab_size' .*'64'"),
        ({"kv_lora_rank": True}, "'kv_lora_rank' .*True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"q_lora_rank": None}, "q_lora_rank = null"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "RoPE type 'linear'"),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE type 'dynamic'"),
        ({"rope_scaling": {"a": 1}}, "rope_scaling.a 1"),
        ({"rope_scaling": YARN | {"rope_type": None}}, "factor.* need a type"),
        ({"rope_parameters": {"rope_theta": 5e3, "mscale": 1.0}}, "mscale of RoPE need a type"),
        ({"rope_scaling": YARN | {"longest": 4}}, "rope_scaling.longest 4"),
        ({"rope_parameters": {"rope_type": "default", "a": 1}}, "rope_parameters.a 1"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "YaRN needs original_max_position_embeddings"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt 'e5m2'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size .* None"),
        ({"quantization_config": FP8 | {"weight_block_size": [128]}}, r"weight_block_size .*\[128\]"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types names 2 layers, .* 4"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "'half'"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, r"indexer_types\[0\]"),
        ({"index_topk_pattern": "FSXF"}, "index_topk_pattern: 'X'"),
        ({"index_topk_pattern": "FS"}, "index_topk_pattern names 2 layers"),
        ({"mlp_layer_types": ["dense", "moe", "sparse", "sparse"]}, "'moe'"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types names 1 layers, .* 4"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7"),
        ({"index_head_dim": 6}, "index_head_dim 6"),
        ({"n_group": 3}, "n_group 3"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8"),
        ({"topk_group": 3}, "topk_group 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
    ],
)
def test_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(**changes)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such model folder: .*nowhere \(give a Hugging Face folder, or"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint: it has no config.json \(it holds nothing\)"):
        read_config_json(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"it holds notes.txt"):
        read_config_json(tmp_path)
    path = tmp_path / "config.json"
    for content, message in (
        (b"{", "config.json is not valid JSON"),
        (b'{"a":' * 100_000, "config.json is not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            read_config_json(tmp_path)
    path.write_text(json.dumps(SMALL))
    assert ModelConfig.from_pretrained(tmp_path, {"index_topk": 9}).index_topk == 9


@pytest.mark.parametrize(
    "base, overrides, check",
    [
        ({"dtype": "float32"}, {"torch_dtype": "float16"}, lambda c: c.dtype == torch.float16),
        ({"mlp_layer_types": ["dense"] * 3}, {"first_k_dense_replace": 1}, lambda c: c.mlp_layer_types[1] == "sparse"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_theta": 5e5},
            lambda c: c.rope.theta == 5e5,
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}},
            lambda c: c.rope.factor == 4 and c.rope.theta == 1e6,
        ),
        (
            {"indexer_types": ["full"] * 3},
            {"index_topk_pattern": "FSS"},
            lambda c: c.indexer_types[1:] == ("shared",) * 2,
        ),
    ],
)
def test_an_override_counts_under_every_name(base: dict[str, Any], overrides: dict[str, Any], check: Any) -> None:
    assert check(ModelConfig.from_dict(SMALL | {"model_type": "glm_moe_dsa", "num_hidden_layers": 3} | base, overrides))


def test_more_end_tokens_from_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"eos_token_id": 1}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (1, 7)


def test_an_override_without_a_reader_is_refused() -> None:
    with pytest.raises(ValueError, match="'num_hiden_layers'; did you mean 'num_hidden"):
        ModelConfig.from_dict(SMALL, {"num_hiden_layers": 2})
    with pytest.raises(ValueError, match="has a key 'zzz'$"):
        ModelConfig.from_dict(SMALL, {"zzz": 2})
    for rope in ({"rope_scaling": {"factor": 2.0}}, {"rope_parameters": {"factor": 2.0}}):  # GLM-5 has no scaling
        with pytest.raises(ValueError, match="factor of RoPE changes nothing .* give rope_type 'yarn'"):
            ModelConfig.from_dict(released_config("glm_moe_dsa"), rope)
    assert ModelConfig.from_dict(SMALL | {"use_cache": True}, {"use_cache": False}) == ModelConfig.from_dict(SMALL)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ({"rope_parameters": {"rope_theta": 5e4}}, {"theta": 5e4}),
        ({"rope_theta": 5e4}, {"theta": 5e4}),
        ({"rope_parameters": {"factor": 20.0}}, {"factor": 20.0}),
        ({"rope_scaling": {"factor": 20.0}}, {"factor": 20.0}),
        ({"rope_scaling": None}, {"factor": 1.0}),
    ],
    ids=str,
)
def test_an_override_of_rope_under_both_spellings(override: dict[str, Any], changed: dict[str, float]) -> None:
    old = released_config("deepseek_v32")
    yarn = {"rope_type" if key == "type" else key: value for key, value in old["rope_scaling"].items()}
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**yarn, "rope_theta": old["rope_theta"]}
    wanted = {"theta": 10000.0, "factor": 40.0} | changed
    for raw in (old, new):
        rope = ModelConfig.from_dict(raw, override).rope
        assert {"theta": rope.theta, "factor": rope.factor} == wanted
