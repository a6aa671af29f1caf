"""INT8 and INT4 models: against ``transformers`` in float64 with the same codes and scales, whatever the batch, the
chunks and the ranks; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM, SamplingParams
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.int8 import quantize_rows_int8_reference
from dsa_engine.weights.convert import quantize_checkpoint
from dsa_engine.weights.formats import GroupedExperts, Matrix, weight_format
from dsa_engine.weights.formats.int4 import Int4Experts
from dsa_engine.weights.formats.int8 import Int8Experts, Int8Linear

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "cache_memory": "64MiB", "progress": False}
SCHEMES = {"int8": ("int8", False), "w4a16": ("int4-experts", False), "w4a8": ("int4-experts", True)}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stored(oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of ``oracle("deepseek_v32", **SIZES)`` in one of SCHEMES."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            quantize, int8_activations = SCHEMES[name]
            made[name] = tmp_path_factory.mktemp("quantised") / name
            source = oracle("deepseek_v32", **SIZES).folder
            quantize_checkpoint(source, made[name], quantize, int8_activations=int8_activations)
        return made[name]

    return get


def plain_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a folder as float64, codes times scales, worked out in the plainest way."""
    tensors = load_file(folder / "model.safetensors")
    dequantized = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            codes = torch.stack([(tensor.long() >> 4 * i) % 16 - 8 for i in range(8)], dim=-1).flatten(-2).double()
            scale = tensors[name.replace("_packed", "_scale")].double()
            dequantized[name.removesuffix("_packed")] = codes * scale.repeat_interleave(128, dim=1)
        elif tensor.dtype == torch.int8:
            dequantized[name] = tensor.double() * tensors[f"{name}_scale"].double()
        elif not name.endswith(("_scale", "_shape")):
            dequantized[name] = tensor.double()
    return dequantized


class Rounding:
    """Rounds what the float64 model has to the codes that the engine has, where those are nearest but for a tie: beside
    the middle of two codes float32 and float64 may take different ones, and all that follows would differ."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.inputs: dict[str, torch.Tensor] = {}  # by the path of a module, of its last call
        self.outputs: dict[str, torch.Tensor] = {}
        self.other_rows = 0  # those which are not the engine's, for instance as it has selected other tokens
        linear, experts = Int8Linear.__call__, GroupedExperts.__call__

        def watched_linear(made: Int8Linear, x: torch.Tensor) -> torch.Tensor:
            self.inputs |= {source.name.removesuffix(".weight"): x.clone() for source in made.sources}
            return linear(made, x)

        def watched_experts(made: GroupedExperts, received: Any, uncounted_bytes: int) -> torch.Tensor:
            path = made.sources[0].name.split(".experts.")[0] + ".experts"
            self.inputs[path], self.outputs[path] = received.tokens.clone(), experts(made, received, uncounted_bytes)
            return self.outputs[path].clone()

        patch.setattr(Int8Linear, "__call__", watched_linear)
        patch.setattr(GroupedExperts, "__call__", watched_experts)

    def __call__(self, path: str, x: torch.Tensor) -> torch.Tensor:
        """The rows that the module at ``path`` gets, through INT8 and back."""
        scale = x.abs().amax(dim=-1, keepdim=True) / 127
        if path.endswith("indexer.wq_b"):  # in the engine only of rows that select
            return (x / scale).round() * scale
        codes = quantize_rows_int8_reference(self.inputs[path])[0].double().view(x.shape)
        same = (codes - x / scale).abs().amax(dim=-1, keepdim=True) < 0.5 + 1e-3
        self.other_rows += int((~same).sum())
        return codes.where(same, (x / scale).round()) * scale

    def summed(self, path: str, own: torch.Tensor, codes_beside_ties: torch.Tensor) -> torch.Tensor:
        """The experts' sum: the engine's in rows where a code between their products is another, which may be off by
        no more than ``codes_beside_ties``."""
        theirs = self.outputs[path].double()
        off, bound = (theirs - own).abs(), 1e-5 * own.abs().amax(dim=-1, keepdim=True)
        rounded = (off > bound).any(dim=-1, keepdim=True) & (off <= bound + codes_beside_ties).all(dim=-1, keepdim=True)
        self.other_rows += int(((off > bound).any(dim=-1, keepdim=True) & ~rounded).sum())
        return theirs.where(rounded, own)


def naive_experts(module: Any, weights: dict[str, torch.Tensor], path: str, rounding: Rounding | None) -> Any:
    def forward(self: Any, x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out, beside = torch.zeros_like(x), torch.zeros_like(x)
        x = x if rounding is None else rounding(path, x)
        for expert in chosen.unique().tolist():
            token, choice = torch.where(chosen == expert)
            gate, up, down = (weights[f"{path}.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            hidden = torch.nn.functional.silu(x[token] @ gate.t()) * (x[token] @ up.t())
            factor = factors[token, choice, None]
            if rounding is not None:
                scale = hidden.abs().amax(dim=-1, keepdim=True) / 127
                values = hidden / scale
                ties = ((values - values.floor() - 0.5).abs() < 2e-4) * scale
                beside.index_add_(0, token, ties @ down.t().abs() * factor)
                hidden = values.round() * scale
            out.index_add_(0, token, hidden @ down.t() * factor)
        return out if rounding is None else rounding.summed(path, out, beside)

    return MethodType(forward, module)


@torch.no_grad()
def naive_logits(model: Any, folder: Path, name: str, ids: list[int], rounding: Rounding) -> torch.Tensor:
    """``transformers`` in float64 with the weights of ``folder``, inputs of quantised layers rounded on their way as
    in the engine's last call."""
    import copy

    model = copy.deepcopy(model).double()
    weights = plain_weights(folder)
    int8 = {n for n, t in load_file(folder / "model.safetensors").items() if t.dtype == torch.int8}
    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            module.forward = naive_experts(module, weights, path, None if name == "w4a16" else rounding)
        elif f"{path}.weight" in weights:
            module.weight.data = weights[f"{path}.weight"]
            if f"{path}.weight" in int8:
                module.register_forward_pre_hook(lambda _, inputs, path=path: (rounding(path, inputs[0]), *inputs[1:]))
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_same_quantisation_in_float64(
    name: str,
    stored: Callable[[str], Path],
    oracle: Callable[..., Any],
    random_ids: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows of prompts in which nothing is selected, and most of a long one, where a selection may be another."""
    folder, original = stored(name), oracle("deepseek_v32", **SIZES)
    rounding = Rounding(monkeypatch)
    llm = LLM(folder, **OPTIONS)
    kinds = {type(layer.moe.experts) for layer in llm.engine.model.layers if layer.moe is not None}
    assert kinds == {Int8Experts if name == "int8" else Int4Experts}
    assert isinstance(llm.engine.model.layers[0].attention.o, Int8Linear) == (name == "int8")
    for length, seed in ((64, 0), (64, 1), (64, 2), (200, 0)):  # 64 are selected
        ids = random_ids(length, seed=seed)
        got = llm.prompt_logits(ids)
        wanted = naive_logits(original.model, folder, name, ids, rounding)
        rows = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
        print(f"{name}, {length} tokens: rows {rows.median():.1e} to {rows.max():.1e}, {rounding.other_rows} others")
        assert float(rows.median()) < 1e-5
        if length == 64:
            assert float(rows.max()) < 1e-5 and rounding.other_rows == 0
            assert float((original.logits(ids) - wanted).norm() / wanted.norm()) > 5e-3  # the scheme was applied


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_see_no_neighbours(name: str, stored: Callable[[str], Path], random_ids: Callable[..., list[int]]) -> None:
    """The same logits in chunks, the same tokens alone and in a batch; and the memory is what is stored."""
    prompts = [random_ids(length) for length in (150, 30, 97)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    whole, chunked = (LLM(stored(name), max_num_batched_tokens=n, **OPTIONS) for n in (512, 32))
    logits = whole.prompt_logits(prompts[0][:64])  # before anything is selected
    error = (chunked.prompt_logits(prompts[0][:64]) - logits).norm(dim=1) / logits.norm(dim=1)
    assert float(error.median()) < 1e-5  # a code of some rows lies beside a tie, as above
    together = [out.token_ids for out in whole.generate(prompts, params)]
    assert [chunked.generate(prompt, params)[0].token_ids for prompt in prompts] == together
    assert whole.engine.bytes_read == sum(
        t.nbytes for n, t in load_file(stored(name) / "model.safetensors").items() if not n.endswith("_shape")
    )


def test_parts_of_columns_are_scaled_as_whole_rows(stored: Callable[[str], Path]) -> None:
    """What a tensor-parallel rank does with its columns of o_proj."""
    config = LLM(stored("int8"), load_format="dummy", **OPTIONS).engine.config
    made = weight_format(config.quantization, None, torch.float32, CPU)
    name = "model.layers.0.self_attn.o_proj.weight"
    whole, *parts = (made.linear(Matrix(name, 16, 64, kept_columns=columns)) for columns in (None, (0, 16), (16, 64)))
    weight, scale, x = torch.randint(-127, 128, (16, 64)).to(torch.int8), torch.rand(16), torch.randn(5, 64)
    for linear, columns in zip((whole, *parts), ((0, 64), (0, 16), (16, 64)), strict=True):
        codes, scales = linear.sources
        assert codes.into.copy_(weight[:, slice(*columns)]).shape == (16, columns[1] - columns[0])
        scales.into.copy_(scale[:, None])
    assert whole.scales_whole_rows
    largest = x.abs().amax(dim=1)
    sums = parts[0].forward_sharded(x[:, :16], largest) + parts[1].forward_sharded(x[:, 16:], largest)
    torch.testing.assert_close(sums, whole(x), rtol=1e-5, atol=1e-5)


def edited(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with some of its tensors and its configuration changed."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("name", ["int8", "w4a16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_bad_scales(name: str, value: float | None, stored: Callable[[str], Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        if value is None:
            del tensors[f"{EXPERT}_scale"]
        else:
            tensors[f"{EXPERT}_scale"][2, 0] = value

    folder = edited(stored(name), tmp_path / "bad", change)
    error = "has no tensor" if value is None else "not finite"
    with pytest.raises(CheckpointError, match=error) as raised:
        LLM(folder, **OPTIONS)
    assert f"{EXPERT}_scale" in str(raised.value)


GROUP = ("quantization_config", "config_groups", "group_0")


def with_key(*path: str, value: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(_: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        at = config
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "name, key, value, error",
    [
        ("w4a16", "weights.group_size", 64, r"gate_proj.weight_scale' .*\[128, 2\].*\[128, 4\]"),
        ("w4a16", "weights.group_size", 48, "int4 in groups of 48"),
        ("w4a16", "weights.symmetric", False, "with zero points, pack-quantized"),
        ("w4a16", "weights.num_bits", 3, "int3 in groups of 128"),
        ("int8", "weights.strategy", "tensor", "int8 by tensor with 8-bit activations"),
        ("int8", "weights.symmetric", False, "with zero points, int-quantized"),
        ("int8", "format", "marlin-24", "int8 by channel .* marlin-24"),
        ("int8", "input_activations", None, "int8 by channel with plain activations"),
        ("int8", "input_activations.strategy", "tensor", "input_activations.strategy"),
        ("int8", "input_activations.type", "float", "input_activations.type"),
        ("int8", "input_activations.symmetric", False, "input_activations.symmetric"),
    ],
)
def test_schemes_without_a_class_are_named(
    name: str, key: str, value: Any, error: str, stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = edited(stored(name), tmp_path / "other", with_key(*GROUP, *key.split("."), value=value))
    with pytest.raises(ValueError, match=error):
        LLM(folder, **OPTIONS)


def test_columns_of_a_rank_end_with_a_group(stored: Callable[[str], Path]) -> None:
    config = LLM(stored("w4a16"), load_format="dummy", **OPTIONS).engine.config
    made = weight_format(config.quantization, None, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"this rank keeps \[64, 256\]: rows of 64 columns cannot be cut into groups"):
        made.linear(Matrix(EXPERT, 16, 256, kept_columns=(64, 256)))


@pytest.mark.parametrize("name", SCHEMES)
def test_dummy_weights(name: str, stored: Callable[[str], Path]) -> None:
    """Random codes of any part are those of the whole, and the scaled weights are of the usual size."""
    llm = LLM(stored(name), load_format="dummy", **OPTIONS)
    assert bool(llm.prompt_logits([5, 6, 7]).isfinite().all())
    moe = llm.engine.model.layers[1].moe
    assert moe is not None
    made = moe.experts
    if isinstance(made, Int4Experts):
        from dsa_engine.kernels.formats.int4 import dequantize_int4, planes_for

        planes = planes_for(name == "w4a8")
        weight = dequantize_int4(made.gate_up[0][0], made.gate_up[1][0], torch.float32, planes)
    else:
        assert isinstance(made, Int8Experts)
        weight = made.gate_up[0][0] * made.gate_up[1][0][:, None]
    assert 0.015 < float(weight.std()) < 0.025
