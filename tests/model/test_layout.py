"""The released layout against what transformers saves and loads, and sizes that are published or worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import RELEASED_CONFIGS, released_config
from dsa_engine.demo.random_checkpoint import RESIDUAL_GAIN, write_random_checkpoint
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.model.layout import ParameterCounts, parameter_counts, released_tensors
from dsa_engine.weights import CheckpointReader, Source, TensorSpec

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "index_n_heads": 12,
    "index_head_dim": 16,
    "index_topk": 16,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 1,
    "dtype": "float32",
}


def tiny(model_type: str) -> dict[str, Any]:
    raw = TINY | {"model_type": model_type}
    if model_type == "glm_moe_dsa":
        raw["indexer_types"] = ["full", "shared", "full"]
    return raw


MODEL_TYPES = ["deepseek_v32", "glm_moe_dsa", "deepseek_v3"]


def is_mtp(name: str) -> bool:
    return name.startswith("model.layers.3.")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_names_and_shapes_are_those_that_transformers_saves(tmp_path: Path, model_type: str, tied: bool) -> None:
    raw = tiny(model_type) | {"tie_word_embeddings": tied}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    model.save_pretrained(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    ours = {s.name: s.shape for s in released_tensors(ModelConfig.from_dict(raw), fp8=False) if not is_mtp(s.name)}
    assert ours == saved
    # The configuration that transformers saves with it (other keys than the released ones) means the same tensors.
    again = ModelConfig.from_pretrained(tmp_path, {"num_nextn_predict_layers": 0})
    assert {s.name: s.shape for s in released_tensors(again, fp8=False)} == saved


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_transformers_loads_a_random_checkpoint(tmp_path: Path, model_type: str) -> None:
    raw = tiny(model_type)
    write_random_checkpoint(tmp_path / "out", raw, fp8=False, max_shard_size="200KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["error_msgs"]
    assert all(is_mtp(name) for name in info["unexpected_keys"])  # transformers has no MTP module
    logits, dense = (forward(model, topk) for topk in (16, 512))
    assert torch.isfinite(logits).all() and 0.3 < logits.std() < 3
    if model_type != "deepseek_v3":
        # The model is one where it matters what the indexer selects; below index_topk everything is selected.
        difference = (logits - dense).norm(dim=-1) / dense.norm(dim=-1)
        assert difference[:16].max() < 1e-5 and difference[100:].mean() > 0.1


def forward(model: Any, index_topk: int) -> torch.Tensor:
    for layer in model.model.layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.indexer.index_topk = index_topk
    tokens = torch.randint(0, 100, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits[0].float()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_random_checkpoint_holds_the_layout_and_every_rank_can_load_it(
    tmp_path: Path, model_type: str, fp8: bool
) -> None:
    raw = tiny(model_type) | {"dtype": "bfloat16"}
    written = write_random_checkpoint(tmp_path / "out", raw, seed=5, fp8=fp8)
    config = ModelConfig.from_pretrained(tmp_path / "out")
    assert config.weight_block_size == ((128, 128) if fp8 else None)
    specs = list(released_tensors(config, fp8))
    assert written.tensors == len(specs) and written.tensor_bytes == sum(spec.nbytes for spec in specs)
    with CheckpointReader(tmp_path / "out", config.weight_block_size) as reader:
        assert {name: reader.describe(name) for name in reader.names()} == {s.name: (s.shape, s.dtype) for s in specs}
        for spec in specs:
            if spec.name.endswith("_scale_inv"):
                continue
            into = torch.empty(spec.shape)
            reader.load(Source(spec.name, into, spec.shape))
            check_scale(spec, into)
        assert reader.bytes_read == written.tensor_bytes
    write_random_checkpoint(tmp_path / "again", raw, seed=5, fp8=fp8)
    write_random_checkpoint(tmp_path / "other", raw, seed=6, fp8=fp8)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again", "other")]
    assert files[0] == files[1] != files[2]


def check_scale(spec: TensorSpec, values: torch.Tensor) -> None:
    """A projection keeps its input's variance, or damps it before the residual; norms are near 1, biases near 0."""
    assert torch.isfinite(values).all() and values.unique().numel() > 4, spec.name
    if values.dim() == 2:
        fan_in = 1 if "embed_tokens" in spec.name else values.shape[1]
        gain = RESIDUAL_GAIN if spec.name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        assert values.std() * fan_in**0.5 == pytest.approx(gain, rel=0.15), spec.name
    else:
        assert values.mean() == pytest.approx(0 if spec.name.endswith("bias") else 1, abs=0.2), spec.name
        assert 0.03 < values.std() < 0.2, spec.name


def test_what_is_fp8_and_what_is_not() -> None:
    specs = {s.name: s for s in released_tensors(ModelConfig.from_dict(released_config("deepseek_v32")), fp8=True)}

    def stored(name: str) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...] | None]:
        scale = specs.get(name + "_scale_inv")
        assert specs[name].quantized == (scale is not None) and (scale is None or scale.dtype == torch.float32)
        return specs[name].shape, specs[name].dtype, scale.shape if scale else None

    fp8, bf16, f32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    layer, mtp = "model.layers.3.", "model.layers.61."
    assert stored("model.embed_tokens.weight") == ((129280, 7168), bf16, None)
    assert stored("lm_head.weight") == ((129280, 7168), bf16, None)
    assert stored("model.norm.weight") == ((7168,), bf16, None)
    for prefix in (layer, mtp):
        assert stored(prefix + "self_attn.q_a_proj.weight") == ((1536, 7168), fp8, (12, 56))
        assert stored(prefix + "self_attn.q_b_proj.weight") == ((24576, 1536), fp8, (192, 12))
        assert stored(prefix + "self_attn.kv_a_proj_with_mqa.weight") == ((576, 7168), fp8, (5, 56))  # 4.5 blocks
        assert stored(prefix + "self_attn.kv_b_proj.weight") == ((32768, 512), fp8, (256, 4))
        assert stored(prefix + "self_attn.o_proj.weight") == ((7168, 16384), fp8, (56, 128))
        assert stored(prefix + "self_attn.indexer.wq_b.weight") == ((8192, 1536), fp8, (64, 12))
        assert stored(prefix + "self_attn.indexer.wk.weight") == ((128, 7168), fp8, (1, 56))
        assert stored(prefix + "self_attn.indexer.weights_proj.weight") == ((64, 7168), bf16, None)
        assert stored(prefix + "self_attn.indexer.k_norm.bias") == ((128,), f32, None)
        assert stored(prefix + "mlp.gate.weight") == ((256, 7168), bf16, None)
        assert stored(prefix + "mlp.gate.e_score_correction_bias") == ((256,), f32, None)
        assert stored(prefix + "mlp.experts.255.down_proj.weight") == ((7168, 2048), fp8, (56, 16))
        assert stored(prefix + "mlp.shared_experts.up_proj.weight") == ((2048, 7168), fp8, (16, 56))
    assert stored("model.layers.2.mlp.gate_proj.weight") == ((18432, 7168), fp8, (144, 56))
    assert stored(mtp + "eh_proj.weight") == ((7168, 14336), bf16, None)
    assert stored(mtp + "shared_head.head.weight") == ((129280, 7168), bf16, None)
    assert stored(mtp + "embed_tokens.weight") == ((129280, 7168), bf16, None)
    assert {mtp + "enorm.weight", mtp + "hnorm.weight", mtp + "shared_head.norm.weight"} <= specs.keys()


def test_shared_indexers_have_no_tensors_but_the_mtp_module_has_its_own() -> None:
    names = [s.name for s in released_tensors(ModelConfig.from_dict(tiny("glm_moe_dsa")), fp8=False)]
    assert len(names) == len(set(names))
    assert {name.split(".")[2] for name in names if ".indexer." in name} == {"0", "2", "3"}
    dense = [s.name for s in released_tensors(ModelConfig.from_dict(tiny("deepseek_v3")), fp8=False)]
    assert not [name for name in dense if ".indexer." in name]


def test_the_mtp_module_copies_the_embedding_and_the_head(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "out", tiny("deepseek_v32"), fp8=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["model.layers.3.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors["model.layers.3.shared_head.head.weight"], tensors["lm_head.weight"])


def test_parameters_of_the_released_models() -> None:
    v32, v3, glm = (
        parameter_counts(ModelConfig.from_dict(released_config(name)))
        for name in ("deepseek_v32", "deepseek_v3", "glm_moe_dsa")
    )
    # DeepSeek-V3 is published as 671B parameters with 37B active, GLM-5 as 744B with 40B active.
    assert v3.total == 671_026_419_200 and round(v3.active / 1e9, 1) == 37.6
    assert glm.total == 743_911_218_432 and round(glm.active / 1e9, 1) == 41.8
    # V3.2 adds an indexer to each of 61 layers: wq_b, wk, weights_proj, k_norm.
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    assert v32.total == v3.total + 61 * indexer == 671_877_944_064
    assert v32.active == v3.active + 61 * indexer
    # A layer's attention and indexer, and an expert, as in the design: 201 M and 44 M.
    names = {s.name: s.numel for s in released_tensors(ModelConfig.from_dict(released_config("deepseek_v32")), False)}
    assert round(sum(n for name, n in names.items() if name.startswith("model.layers.9.self_attn.")) / 1e6) == 201
    assert round(sum(n for name, n in names.items() if name.startswith("model.layers.9.mlp.experts.7.")) / 1e6) == 44
    # The module is a decoder layer with 256 experts, two copies of the vocabulary, and eh_proj.
    layer = sum(n for name, n in names.items() if name.startswith("model.layers.9."))
    assert v32.mtp == layer + 2 * 129280 * 7168 + 7168 * 2 * 7168 + 3 * 7168
    # In FP8 one byte for most, two for the vocabulary, and four for every 128 x 128 block.
    stored = released_tensors(ModelConfig.from_dict(released_config("deepseek_v32")), True)
    fp8 = sum(s.nbytes for s in stored if not s.name.startswith("model.layers.61."))
    assert fp8 == pytest.approx(v32.total * (1 + 4 / 128**2) + 2 * 129280 * 7168, rel=1e-3)


def test_the_sizes_of_glm_5_2() -> None:
    """By hand from config.json, and the numbers of its FP8 release: 59,585 tensors, of which 59,044 have scales, in
    files of 755,632,050,320 bytes with their headers; a module of 19,905,841,664 bytes in bfloat16."""
    config = ModelConfig.from_dict(released_config("glm_5_2"))
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)] and len(full) == 21
    indexer = 2048 * 32 * 128 + 6144 * 128 + 6144 * 32 + 2 * 128  # wq_b, wk, weights_proj, k_norm
    attention = 6144 * 2048 + 2048 + 2048 * 64 * 256 + 6144 * 576 + 512 + 512 * 64 * (192 + 256) + 64 * 256 * 6144
    layer, expert = attention + 2 * 6144, 3 * 6144 * 2048
    moe = 257 * expert + 256 * 6144 + 256
    main = 2 * 154880 * 6144 + 6144 + 78 * layer + 21 * indexer + 3 * 3 * 6144 * 12288 + 75 * moe
    module = layer + indexer + moe + 2 * 6144 * 6144 + 3 * 6144
    assert parameter_counts(config) == ParameterCounts(main, main - 75 * 248 * expert, module)
    assert 2 * module + 2 * 256 == 19_905_841_664  # the router's bias is in float32
    stored = released_tensors(config, fp8=True)
    assert sum(s.name.endswith("_scale_inv") for s in stored) == 59_044 and len(stored) == 59_585 + 59_044
    headers = 755_632_050_320 - sum(s.nbytes for s in stored)
    assert 100 < headers / len(stored) < 150  # name, dtype, shape and offsets of a tensor
    caches = [cache_bytes_per_token(config, cache_format(config, dtype)) for dtype in (torch.bfloat16, FP8)]
    assert caches == [78 * 576 * 2 + 21 * 128 * 2, 78 * 656 + 21 * 132]


def test_a_thin_copy_of_glm_5_2(tmp_path: Path) -> None:
    """Its checkpoint has index tensors in the layers 0, 1, 2, 6 and in the module alone; as many numbers as counted."""
    thin = {key: value for key, value in tiny("glm_moe_dsa").items() if key != "indexer_types"}
    raw = released_config("glm_5_2") | thin | {"num_hidden_layers": 9, "eos_token_id": 1}
    write_random_checkpoint(tmp_path / "out", raw, fp8=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    indexed = {int(name.split(".")[2]) for name in tensors if ".indexer." in name}
    config = ModelConfig.from_pretrained(tmp_path / "out")
    counts, kinds = parameter_counts(config), [*config.indexer_types, "full"]
    assert indexed == {layer for layer, kind in enumerate(kinds) if kind == "full"} == {0, 1, 2, 6, 9}
    assert sum(tensor.numel() for tensor in tensors.values()) == counts.total + counts.mtp
    assert config.index_share_for_mtp_iteration


def test_cache_bytes_per_token() -> None:
    def per_token(raw: dict[str, Any], dtype: torch.dtype) -> int:
        config = ModelConfig.from_dict(raw)
        return cache_bytes_per_token(config, cache_format(config, dtype))

    v32 = released_config("deepseek_v32")
    assert per_token(v32, torch.bfloat16) == 61 * (576 + 128) * 2 == 85_888
    assert per_token(v32, torch.float8_e4m3fn) == 61 * (656 + 132)
    assert per_token(v32, torch.float32) == 2 * 85_888
    shared = tiny("glm_moe_dsa")  # two of three layers have index keys
    assert per_token(shared, torch.float32) == (3 * 40 + 2 * 16) * 4
    assert per_token(tiny("deepseek_v3"), torch.float32) == 3 * 40 * 4


def test_released_configurations() -> None:
    for name in RELEASED_CONFIGS:
        config = released_config(name)
        assert ModelConfig.from_dict(config).model_type == config["model_type"]
        assert config["model_type"] == ("glm_moe_dsa" if name.startswith("glm") else name)
        config["rope_theta"] = config["num_hidden_layers"] = None  # a copy: the original stays
        assert released_config(name)["num_hidden_layers"] in (61, 78)
        # transformers' defaults for the type are the released sizes.
        theirs = transformers.AutoConfig.for_model(config["model_type"])
        sizes = {key: value for key, value in released_config(name).items() if isinstance(value, int | float)}
        for key in sizes.keys() - {"bos_token_id", "eos_token_id"}:
            # The one exception: the default lengths are those of other releases.
            if hasattr(theirs, key) and key != "max_position_embeddings":
                assert (key, getattr(theirs, key)) == (key, sizes[key])
    with pytest.raises(ValueError, match="no released configuration 'gpt'.*deepseek_v32"):
        released_config("gpt")


@pytest.mark.parametrize("bad", [{"model_type": "llama"}, {"hidden_size": None}, {"n_group": 3}])
def test_a_bad_configuration_writes_nothing(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        write_random_checkpoint(tmp_path / "out", tiny("deepseek_v32") | bad, fp8=True)
    assert list(tmp_path.iterdir()) == []
