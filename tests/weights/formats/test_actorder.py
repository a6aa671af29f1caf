"""INT4 whose groups are columns in any order (``actorder: "group"`` and ``g_idx``), as GPTQ stores them: the model
computes with ``code[i, j] · scale[i, g_idx[j]]``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.int4 import pack_int4, quantize_int4, unpack_int4
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.weights import CheckpointReader
from dsa_engine.weights.formats import Matrix, WeightFormat, weight_format
from dsa_engine.weights.formats.int4 import Int4Experts, Int4Linear

GROUP = 32
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "q_lora_rank": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "v_head_dim": 16,
    "n_routed_experts": 6,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "cache_memory": "16MiB", "progress": False}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


class Stored(NamedTuple):
    packed: Path  # INT4, with g_idx
    plain: Path  # the same weights in plain numbers


def scheme(**weights: Any) -> dict[str, Any]:
    stored = {"num_bits": 4, "strategy": "group", "group_size": GROUP, "actorder": "group"} | weights
    group = {
        "targets": ["re:.*_proj$", "re:.*wq_b$", "re:.*wk$", "re:.*_mqa$"],
        "weights": stored,
        "format": "pack-quantized",
    }
    ignore = ["re:.*weights_proj$"]
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore}


def with_orders(folder: Path, source: Path, *, alike: bool, **weights: Any) -> Stored:
    """Two checkpoints of ``source``: INT4 with random orders, ``alike`` for gate and up, and what it stores."""
    made = Stored(folder / "packed", folder / "plain")
    tensors = load_file(source / "model.safetensors")
    packed, plain = dict(tensors), dict(tensors)
    generator, orders = torch.Generator().manual_seed(0), {}
    for name, tensor in tensors.items():
        if not name.endswith(("_proj.weight", "wq_b.weight", "wk.weight", "_mqa.weight")) or "weights_proj" in name:
            continue
        key = name.replace("up_proj", "gate_proj") if alike else name
        if key not in orders:
            orders[key] = torch.randperm(tensor.shape[1], generator=generator)
        order = orders[key]
        words, scale = quantize_int4(tensor[:, order], GROUP, torch.float32)
        back = order.argsort()
        codes, g_idx = unpack_int4(words)[:, back], (back // GROUP).int()
        del packed[name]
        packed |= {f"{name}_packed": pack_int4(codes), f"{name}_scale": scale, f"{name}_g_idx": g_idx}
        plain[name] = codes * scale[:, g_idx]
    raw = json.loads((source / "config.json").read_text())
    for path, stored, keys in (
        (made.packed, packed, {"quantization_config": scheme(**weights)}),
        (made.plain, plain, {}),
    ):
        path.mkdir()
        save_file(stored, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(raw | keys))
    return made


@pytest.fixture(scope="module")
def source(oracle: Callable[..., Any]) -> Path:
    return oracle("deepseek_v32", **SIZES).folder


@pytest.fixture(scope="module")
def stored(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Stored]:
    made: dict[bool, Stored] = {}

    def get(alike: bool) -> Stored:
        if alike not in made:
            made[alike] = with_orders(tmp_path_factory.mktemp("orders"), source, alike=alike)
        return made[alike]

    return get


@pytest.mark.parametrize("alike", [True, False])
def test_columns_have_the_scale_of_their_group(
    alike: bool,
    stored: Callable[[bool], Stored],
    random_ids: Callable[..., list[int]],
    assert_same_logits: Callable[..., None],
) -> None:
    """All paths: attention projections, ``kv_b_proj`` expanded, the indexer, MLP, shared and routed experts."""
    ids, folders = random_ids(150), stored(alike)
    packed, plain = (LLM(folder, **OPTIONS) for folder in folders)
    assert_same_logits(packed.prompt_logits(ids), plain.prompt_logits(ids), index_topk=64)
    layer = packed.engine.model.layers[1]
    assert isinstance(layer.attention.o, Int4Linear) and isinstance(layer.moe.experts, Int4Experts)
    wanted = load_file(folders.plain / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    torch.testing.assert_close(layer.attention.o.dequantized(), wanted)
    assert packed.engine.bytes_read == (folders.packed / "model.safetensors").stat().st_size - header(folders.packed)


def header(folder: Path) -> int:
    """Bytes before the first tensor of a safetensors file."""
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def made_by(folder: Path) -> WeightFormat:
    config = LLM(folder, load_format="dummy", **OPTIONS).engine.config
    return weight_format(config.quantization, None, torch.float32, torch.device("cpu"))


def test_a_rank_has_some_of_the_experts(stored: Callable[[bool], Stored]) -> None:
    """An expert gives the same, whichever others its rank holds."""
    folder, results = stored(False).packed, []
    x, weights = torch.randn(5, 64), torch.ones(5, 1)
    for held, chosen in (([4, 2, 1], 1), (list(range(6)), 2)):
        experts = made_by(folder).experts([f"model.layers.1.mlp.experts.{e}" for e in held], 64, 64)
        with CheckpointReader(folder) as reader:
            for one in experts.sources:
                reader.load(one)
        experts.loaded()
        number = torch.full((5, 1), chosen, dtype=torch.int32)
        results.append(experts(Received(x, number, weights, 1.0, 5), 1 << 30))
    assert torch.equal(*results)


def test_columns_cannot_be_divided(stored: Callable[[bool], Stored]) -> None:
    made = made_by(stored(True).packed)
    with pytest.raises(ValueError, match=r"'o.*proj.weight' .*columns \[0, 32\] .* tp_size=1"):
        made.linear(Matrix("o_proj.weight", 64, 64, kept_columns=(0, 32)))
    made.linear(Matrix("o_proj.weight", 64, 64, kept_columns=(0, 64)))


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda g: g.fill_(0), r"up_proj.weight_g_idx: column 32 is in group 0: each of the groups 0 … 1 must have 32"),
        (lambda g: g.add_(1), "is in group 1: each of the groups"),
        (lambda g: g.copy_(g.flip(0) * 7), "is in group 7: each of the groups"),
        (lambda g: g.sub_(3), "is in group -3: each of the groups"),
        (None, "has no tensor 'model.layers.1.mlp.experts.3.up_proj.weight_g_idx'"),
    ],
)
def test_bad_groups(change: Any, error: str, stored: Callable[[bool], Stored], tmp_path: Path) -> None:
    tensors = load_file(stored(True).packed / "model.safetensors")
    g_idx = tensors[f"{EXPERT}_g_idx"].sort().values
    if change is None:
        del tensors[f"{EXPERT}_g_idx"]
    else:
        tensors[f"{EXPERT}_g_idx"] = change(g_idx)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((stored(True).packed / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=error):
        LLM(tmp_path, **OPTIONS)


def test_groups_that_were_never_set_are_in_order(
    source: Path, tmp_path: Path, random_ids: Callable[..., list[int]]
) -> None:
    """−1 anywhere, as compressed-tensors reads it: the same model as without an order."""
    folder = with_orders(tmp_path, source, alike=True).packed
    tensors = load_file(folder / "model.safetensors")
    raw, ids = json.loads((folder / "config.json").read_text()), random_ids(20)
    for name in [name for name in tensors if name.endswith("_g_idx")]:
        tensors[name][3] = -1
    save_file(tensors, folder / "model.safetensors")
    unset = LLM(folder, **OPTIONS).prompt_logits(ids)
    save_file({n: t for n, t in tensors.items() if not n.endswith("_g_idx")}, folder / "model.safetensors")
    for actorder in ("weight", "static", None, False):
        raw["quantization_config"] = scheme(actorder=actorder)
        (folder / "config.json").write_text(json.dumps(raw))
        assert torch.allclose(LLM(folder, **OPTIONS).prompt_logits(ids), unset, rtol=1e-5, atol=1e-5)


def test_an_order_that_the_configuration_does_not_name(source: Path, tmp_path: Path) -> None:
    folder = with_orders(tmp_path, source, alike=True, actorder="weight").packed
    with pytest.raises(CheckpointError, match=r"_g_idx.*actorder"):
        LLM(folder, **OPTIONS)
