"""Conversion: the values, the other files, and what a failing or ended run leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine.config.model import ModelConfig, read_config_json
from dsa_engine.demo import demo_config
from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.errors import CheckpointError
from dsa_engine.model.layout import released_tensors
from dsa_engine.weights import CheckpointReader, Source
from dsa_engine.weights.convert import dequantize_checkpoint

CONFIG = demo_config() | {
    "num_hidden_layers": 2,
    "hidden_size": 144,  # no multiple of the block size
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    extra = {"tokenizer.json": "{}", "generation_config.json": "{}", "LICENSE": "words"}
    write_random_checkpoint(folder, CONFIG, fp8=True, max_shard_size="200KB", extra_files=extra)
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / ".gitattributes").write_text("")
    (folder / "figures").mkdir()
    return folder


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_values_dtypes_and_files(tmp_path: Path, source: Path, dtype: torch.dtype) -> None:
    written = dequantize_checkpoint(source, tmp_path / "out", dtype=dtype, max_shard_size="1MB")
    config = ModelConfig.from_pretrained(tmp_path / "out")
    assert config.weight_block_size is None and config.dtype == dtype
    converted = load_all(tmp_path / "out")
    expected = {spec.name: spec for spec in released_tensors(config, fp8=False)}
    assert {name: (tuple(t.shape), t.dtype) for name, t in converted.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in expected.items()
    }
    with CheckpointReader(source, (128, 128)) as reader:
        for name, tensor in converted.items():
            into = torch.empty(tensor.shape, dtype=tensor.dtype)
            reader.load(Source(name, into, tuple(tensor.shape)))
            assert torch.equal(into, tensor), name
    assert written.shards > 1 and written.tensors == len(converted)
    assert written.dequantized == sum(
        spec.quantized for spec in released_tensors(ModelConfig.from_dict(CONFIG), fp8=True)
    )
    assert written.tensor_bytes == sum(t.numel() * t.element_size() for t in converted.values())
    others = {p.name for p in (tmp_path / "out").iterdir() if "safetensors" not in p.name}
    assert others == {"config.json", "tokenizer.json", "generation_config.json", "LICENSE"}
    assert (tmp_path / "out" / "LICENSE").read_text() == "words"
    before, after = read_config_json(source), read_config_json(tmp_path / "out")
    assert before.pop("quantization_config") and before.pop("torch_dtype") == "bfloat16"
    assert after.pop("torch_dtype") == str(dtype).removeprefix("torch.")
    assert after == before


def test_the_newer_dtype_key_is_updated_too(tmp_path: Path) -> None:
    raw = {key: value for key, value in CONFIG.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
    write_random_checkpoint(tmp_path / "in", raw, fp8=True)
    dequantize_checkpoint(tmp_path / "in", tmp_path / "out", dtype=torch.float32)
    converted = read_config_json(tmp_path / "out")
    assert converted["dtype"] == "float32" and "torch_dtype" not in converted


def test_transformers_reads_the_result(tmp_path: Path, source: Path) -> None:
    transformers = pytest.importorskip("transformers")
    dequantize_checkpoint(source, tmp_path / "out", dtype=torch.float32)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith("model.layers.2.") for name in info["unexpected_keys"])
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"  # partial blocks both ways
    into = torch.empty(80, 144)
    with CheckpointReader(source, (128, 128)) as reader:
        reader.load(Source(name, into, (80, 144)))
    assert torch.equal(model.state_dict()[name], into)


def test_float16_overflow_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIG))
    tensors = {"w.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.full((1, 1), 1e5)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match="'w.weight' holds values that are not finite in torch.float16"):
        dequantize_checkpoint(tmp_path / "in", tmp_path / "out", dtype=torch.float16)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    dequantize_checkpoint(tmp_path / "in", tmp_path / "out", dtype=torch.bfloat16)
    assert load_all(tmp_path / "out")["w.weight"].float().max() == pytest.approx(1e5, rel=0.01)


def test_bad_sources_and_targets_leave_nothing(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="no such model folder"):
        dequantize_checkpoint(tmp_path / "nowhere", out)
    with pytest.raises(ValueError, match="cannot convert to torch.int8; supported are float32, bfloat16, float16"):
        dequantize_checkpoint(source, out, dtype=torch.int8)
    write_random_checkpoint(tmp_path / "plain", CONFIG, fp8=False)
    with pytest.raises(CheckpointError, match="holds no FP8 weights"):
        dequantize_checkpoint(tmp_path / "plain", out)
    write_random_checkpoint(tmp_path / "cut", CONFIG, fp8=True, max_shard_size="200KB")
    last = sorted((tmp_path / "cut").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{last.name} is truncated or damaged"):
        dequantize_checkpoint(tmp_path / "cut", out)
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        dequantize_checkpoint(source, tmp_path / "plain")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "plain"]


def test_scales_that_fail_in_the_middle_leave_nothing(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "in", CONFIG, fp8=True)
    tensors = load_all(tmp_path / "in")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match="'model.layers.1.mlp.experts.3.up_proj.weight_scale_inv'"):
        dequantize_checkpoint(tmp_path / "in", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_scripts_make_and_convert(run_script: Callable[..., Any], tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    options = ["--overrides", json.dumps(overrides), "--max-shard-size", "1MB", "--json", tmp_path / "report.json"]
    made = run_script("make-checkpoint", "--config", "demo", "--output", tmp_path / "fp8", *options)
    assert made.returncode == 0, made.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["files"] == len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    assert f"{report['tensors']:,} tensors" in made.stdout
    assert (tmp_path / "fp8" / "tokenizer.json").exists()
    converted = run_script("convert", tmp_path / "fp8", tmp_path / "plain", "--dtype", "float32")
    assert converted.returncode == 0, converted.stderr
    assert ModelConfig.from_pretrained(tmp_path / "plain").dtype == torch.float32
    assert (tmp_path / "plain" / "tokenizer.json").read_text() == (tmp_path / "fp8" / "tokenizer.json").read_text()
    # A configuration from a folder, another dtype and seed.
    options = ["--config", tmp_path / "fp8", "--output", tmp_path / "f32", "--dtype", "float32", "--seed", 1]
    again = run_script("make-checkpoint", *options)
    assert again.returncode == 0, again.stderr
    config = ModelConfig.from_pretrained(tmp_path / "f32")
    assert (config.dtype, config.weight_block_size, config.num_hidden_layers) == (torch.float32, None, 2)


def test_a_terminated_script_cleans_up(tmp_path: Path) -> None:
    # Nearly 2 GB of weights: it is still writing when the signal comes.
    command = [sys.executable, "-m", "dsa_engine", "make-checkpoint", "--config", "deepseek_v32", "--overrides"]
    overrides = {"vocab_size": 100, "num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    command += [json.dumps(overrides), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not list(tmp_path.glob("out.incomplete-*")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []
