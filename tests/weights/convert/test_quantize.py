"""Quantising a checkpoint: what is written, what the ``compressed-tensors`` package makes of it and the other way
round, and SmoothQuant."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM, cli
from dsa_engine.config.model import ModelConfig, read_config_json
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.errors import CheckpointError
from dsa_engine.weights import CheckpointReader, Source
from dsa_engine.weights.convert import quantize_checkpoint
from dsa_engine.weights.convert.calibration import calibrate, watched
from dsa_engine.weights.convert.smooth import power_of_two_factors

ROOT = Path(__file__).resolve().parents[3]
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "cache_memory": "64MiB", "progress": False}
SCHEMES = [("fp8", False), ("int8", False), ("int4-experts", False), ("int4-experts", True)]


@pytest.fixture(scope="module")
def source(oracle: Callable[..., Any]) -> Path:
    return oracle("deepseek_v32", **SIZES).folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder as the package reads them: its own matching of targets, its own expansion."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    config = QuantizationConfig.model_validate(read_config_json(folder)["quantization_config"])
    (scheme,) = config.config_groups.values()
    tensors, decoded = tensors_of(folder), {}
    for module in {name.rsplit(".", 1)[0] for name in tensors}:
        state = {n.rsplit(".", 1)[1]: t for n, t in tensors.items() if n.rsplit(".", 1)[0] == module}
        ignored = any(match_name(module, entry) for entry in config.ignore)
        targeted = any(target == "Linear" or match_name(module, target) for target in scheme.targets)
        if "weight_scale" in state:
            assert targeted and not ignored, module
            state = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)
        elif "weight" in state and state["weight"].dim() == 2 and "norm" not in module and "embed" not in module:
            assert ignored or not targeted, module
        decoded[f"{module}.weight"] = state.get("weight", torch.empty(0))
    return decoded


@pytest.mark.parametrize("quantize, int8_activations", SCHEMES[1:])
def test_the_package_reads_what_is_written(quantize: str, int8_activations: bool, source: Path, tmp_path: Path) -> None:
    written = quantize_checkpoint(source, tmp_path / "out", quantize, int8_activations=int8_activations)
    theirs, original = decompressed(tmp_path / "out"), tensors_of(source)
    unchanged = {
        name: t for name, t in tensors_of(tmp_path / "out").items() if t.is_floating_point() and "_scale" not in name
    }
    assert all(torch.equal(tensor, original[name]) for name, tensor in unchanged.items())
    llm = LLM(tmp_path / "out", **OPTIONS)
    experts = 2 * 12 * 3
    assert written.quantized == (experts if quantize != "int8" else experts + 3 * 6 + 3 + 2 * 3)
    layer = llm.engine.model.layers[0]
    if quantize == "int8":
        for linear in (layer.attention.o, layer.attention.q_b, layer.mlp.down):
            name = linear.sources[0].name
            torch.testing.assert_close(linear.dequantized(), theirs[name], rtol=1e-6, atol=0)
            worst = original[name].abs().amax(dim=1, keepdim=True) / 127 / 2
            assert bool(((theirs[name] - original[name]).abs() <= worst * 1.0001).all())
    for name in ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.2.mlp.experts.11.gate_proj.weight"):
        error = float((theirs[name].float() - original[name]).norm() / original[name].norm())
        assert error < (0.01 if quantize == "int8" else 0.11)


@pytest.mark.parametrize("bits, layout", [(8, "int-quantized"), (4, "pack-quantized")])
def test_what_the_package_writes_is_read(
    bits: int, layout: str, source: Path, tmp_path: Path, random_ids: Callable[..., list[int]]
) -> None:
    """All linear layers compressed by the package: the model computes with the weights that the package expands."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("W8A8" if bits == 8 else "W4A16", ["Linear"])
    scheme.format = layout
    compressor = BaseCompressor.get_value_from_registry(layout)
    for name in ("packed", "plain"):
        (tmp_path / name).mkdir()
    packed, plain = {}, {}
    for name, tensor in tensors_of(source).items():
        codes = (
            "proj" in name and "weights_proj" not in name and tensor.shape[1] % 128 == 0 if tensor.dim() == 2 else False
        )
        if not codes:
            packed[name] = plain[name] = tensor
            continue
        groups = tensor.unflatten(1, (-1, 128 if bits == 4 else tensor.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module = name.removesuffix("weight")
        state = compressor.compress({"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        packed |= {module + key: value for key, value in state.items()}
        plain[name] = compressor.decompress(state, scheme)["weight"]
    ignore = [n.removesuffix(".weight") for n in plain if n in packed and packed[n].is_floating_point()]
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore, format=layout)
    raw = read_config_json(source)
    for name, tensors, extra in (("packed", packed, {"quantization_config": config.to_dict()}), ("plain", plain, {})):
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(raw | extra, default=str))
    llms = [LLM(tmp_path / name, **OPTIONS) for name in ("packed", "plain")]
    layer = llms[0].engine.model.layers[0]
    for linear in (layer.attention.o, layer.attention.q_b, layer.attention.indexer.wq_b, layer.mlp.down):
        name = linear.sources[0].name.removesuffix("_packed")
        torch.testing.assert_close(linear.dequantized(), plain[name], rtol=1e-6, atol=0)
    if bits == 4:  # W8A8 rounds activations too
        ids = random_ids(60)
        ours, wanted = (llm.prompt_logits(ids) for llm in llms)
        assert float((ours - wanted).norm() / wanted.norm()) < 1e-5
    else:
        experts = llms[0].engine.model.layers[2].moe.experts
        got = experts.down[0][7] * experts.down[1][7][:, None]
        torch.testing.assert_close(got, plain["model.layers.2.mlp.experts.7.down_proj.weight"], rtol=1e-6, atol=0)


def test_fp8_in_the_released_format(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", "fp8", max_shard_size="1MB")
    config, original = ModelConfig.from_pretrained(tmp_path / "out"), tensors_of(source)
    assert config.weight_block_size == (128, 128)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # 40 rows, 256 columns
    into = torch.empty(40, 256)
    with CheckpointReader(tmp_path / "out", (128, 128)) as reader:
        assert reader.describe(name)[1] == torch.float8_e4m3fn
        assert reader.describe(f"{name}_scale_inv")[0] == (1, 2)
        reader.load(Source(name, into, (40, 256)))
        assert reader.describe("model.layers.0.self_attn.indexer.weights_proj.weight")[1] != torch.float8_e4m3fn
    assert float((into - original[name]).norm() / original[name].norm()) < 0.04
    # And from it to the others.
    written = quantize_checkpoint(tmp_path / "out", tmp_path / "again", "int8")
    assert written.dequantized == written.quantized + 3  # kv_b_proj of three layers is in FP8, and never in INT8
    again = tensors_of(tmp_path / "again")
    assert float((again[name] * again[f"{name}_scale"] - into).norm() / into.norm()) < 0.01
    with pytest.raises(CheckpointError, match="quantised already .* from released FP8 to int8"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "more", "fp8")
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize_checkpoint(tmp_path / "again", tmp_path / "more", "int8")


def test_rows_are_taken_some_at_a_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quantize, int8_activations in SCHEMES:
        with monkeypatch.context() as patch:
            quantize_checkpoint(source, tmp_path / f"{quantize}{int8_activations}", quantize)
            patch.setattr("dsa_engine.weights.convert.quantize.CHUNK_ELEMENTS", 7 * 256)
            quantize_checkpoint(source, tmp_path / f"{quantize}{int8_activations} in parts", quantize)
        whole, parts = (tensors_of(tmp_path / f"{quantize}{int8_activations}{end}") for end in ("", " in parts"))
        assert whole.keys() == parts.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor.view(torch.uint8), parts[name].view(torch.uint8)), name


def statistics_of(source: Path, ids: list[int]) -> dict[str, torch.Tensor]:
    llm = LLM(source, **OPTIONS)
    with watched(llm.engine.model) as largest:
        prefill(llm.engine, ids)
    assert not any("Watched" in type(v).__name__ for m in llm.engine.model.modules() for v in vars(m).values())
    return largest


def test_smoothing_changes_no_result_and_narrows_activations(
    source: Path, tmp_path: Path, random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outliers in some channels of a norm, as large models have: with SmoothQuant INT8 is closer to the original."""
    tensors, ids = tensors_of(source), random_ids(120)
    (tmp_path / "wide").mkdir()
    for layer in range(3):
        for norm, takers in (
            ("input_layernorm", ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj")),
        ):
            channels = torch.arange(0, 256, 37)
            tensors[f"model.layers.{layer}.{norm}.weight"][channels] *= 64
            for taker in takers:
                tensors[f"model.layers.{layer}.self_attn.{taker}.weight"][:, channels] /= 64
    save_file(tensors, tmp_path / "wide" / "model.safetensors")
    (tmp_path / "wide" / "config.json").write_text((source / "config.json").read_text())
    plain = LLM(tmp_path / "wide", **OPTIONS).prompt_logits(ids)
    statistics = statistics_of(tmp_path / "wide", ids)
    assert statistics["model.layers.0.self_attn.q_a_proj.weight"].shape == (256,)
    assert statistics["model.layers.0.self_attn.o_proj.weight"].shape == (6 * 24,)
    assert any(name.endswith("experts.3.down_proj.weight") for name in statistics)
    errors = {}
    for name, given in (("raw", None), ("smooth", statistics)):
        quantize_checkpoint(tmp_path / "wide", tmp_path / name, "int8", statistics=given)
        logits = LLM(tmp_path / name, **OPTIONS).prompt_logits(ids)
        errors[name] = float((logits - plain)[:64].norm() / plain[:64].norm())  # before anything is selected
    print(errors)
    assert errors["smooth"] < 0.5 * errors["raw"]
    # The migration alone: powers of two, so that plain weights hold it without an error.
    monkeypatch.setattr("dsa_engine.weights.convert.schemes._int8_specs", lambda spec: [spec])
    monkeypatch.setattr("dsa_engine.weights.convert.schemes._int8_encode", lambda rows: [rows])
    monkeypatch.setattr("dsa_engine.weights.convert.schemes._compressed_tensors", lambda *_, **__: None)
    quantize_checkpoint(tmp_path / "wide", tmp_path / "moved", "int8", statistics=statistics)
    moved = LLM(tmp_path / "moved", **OPTIONS)
    assert float((moved.prompt_logits(ids) - plain)[:64].norm() / plain[:64].norm()) < 1e-5
    narrow = statistics_of(tmp_path / "moved", ids)
    first = "model.layers.0.self_attn.q_a_proj.weight"
    assert float(narrow[first].max() / narrow[first].median()) < 0.3 * float(
        statistics[first].max() / statistics[first].median()
    )


def test_factors() -> None:
    factors = power_of_two_factors(torch.tensor([16.0, 1.0, 0.0, 5.0, 1e9]), torch.tensor([1.0, 4.0, 1.0, 0.0, 1.0]))
    assert factors.tolist() == [4.0, 0.5, 1.0, 1.0, 256.0]


def test_statistics_of_another_model(source: Path, tmp_path: Path) -> None:
    statistics = {"model.layers.0.self_attn.q_a_proj.weight": torch.ones(7)}
    with pytest.raises(CheckpointError, match=r"\[7\] channels for 'model.layers.0.self_attn.q_a_proj.weight', .*256"):
        quantize_checkpoint(source, tmp_path / "out", "int8", statistics=statistics)
    assert list(tmp_path.iterdir()) == []


def test_calibration_of_what_it_cannot_watch(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "out", "int8")
    with pytest.raises(ValueError, match="calibration needs a model in plain numbers"):
        calibrate(LLM(tmp_path / "out", **OPTIONS), "text", 10)


def test_bad_sources_leave_nothing(source: Path, tmp_path: Path, oracle: Callable[..., Any]) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="there is no scheme 'int7'; there are fp8, int8, int4-experts"):
        quantize_checkpoint(source, out, "int7")
    with pytest.raises(ValueError, match="chosen with 'int4-experts' only"):
        quantize_checkpoint(source, out, "int8", int8_activations=True)
    small = oracle("deepseek_v32").folder
    with pytest.raises(ValueError, match=r"experts\.\d+\..*' cannot be stored in INT4: rows of .* groups of 128"):
        quantize_checkpoint(small, out, "int4-experts")
    for change, error in (
        ("nan", "not finite"),
        ("missing", "has no tensor 'model.layers.2.mlp.experts.5.up_proj.weight'"),
    ):
        tensors = tensors_of(source)
        name = "model.layers.2.mlp.experts.5.up_proj.weight"
        if change == "nan":
            tensors[name][1, 1] = float("nan")
        else:
            del tensors[name]
        (tmp_path / change).mkdir()
        save_file(tensors, tmp_path / change / "model.safetensors")
        (tmp_path / change / "config.json").write_text((source / "config.json").read_text())
        with pytest.raises((CheckpointError, ValueError), match=error) as raised:
            quantize_checkpoint(tmp_path / change, out, "int8")
        assert name in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["missing", "nan"]


def convert(*arguments: object) -> None:
    cli.main(["convert", *map(str, arguments)])


def test_from_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model, calibrated on a text, and converted."""
    (tmp_path / "text.txt").write_text("def main():\n    return 0\n" * 10)
    options = ["--calibration", tmp_path / "text.txt", "--calibration-tokens", 50, "--json", tmp_path / "out.json"]
    convert(
        ROOT / "dsa_engine/demo_model",
        tmp_path / "int8",
        "--quantize",
        "int8",
        *options,
    )
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["quantized"] == 180 and "180 weights were quantised" in capsys.readouterr().out
    quantized, plain = tensors_of(tmp_path / "int8"), tensors_of(ROOT / "dsa_engine/demo_model")
    name = "model.layers.0.input_layernorm.weight"
    moved = (quantized[name] / plain[name]).log2()
    assert bool(moved.any()) and torch.equal(moved, moved.round())
    assert (tmp_path / "int8" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "options, error",
    [
        (["--quantize", "int8", "--dtype", "float32"], "--dtype is of plain weights"),
        (["--calibration", "x"], "need --quantize"),
        (["--quantize", "fp8", "--calibration", "x"], "of use where activations are quantised"),
        (["--quantize", "int8", "--calibration", "nowhere.txt"], "nowhere.txt"),
        (["--quantize", "int5"], "invalid choice: 'int5'"),
    ],
)
def test_options_that_do_not_fit(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        convert(ROOT / "dsa_engine/demo_model", tmp_path / "out", *options)
    assert ended.value.code == 2 and error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
