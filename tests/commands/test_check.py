"""``dsa-engine check``: on the demo model, on random checkpoints of every type, and with planted faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa_engine import LLM
from dsa_engine.cli import main
from dsa_engine.commands.check import evidence
from dsa_engine.commands.check.checks import findings
from dsa_engine.commands.check.command import text_ids
from dsa_engine.commands.doctor.checks import Finding
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.demo import trained_folder
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.weights import reader
from oracles import Oracle

TOKENS = 700
OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 2048, "cache_memory": "64MiB"}


def checked(llm: LLM, tokens: int = TOKENS, last: str = "") -> dict[str, Finding]:
    llm.wait_idle()
    results: dict[str, Finding] = {}
    for one in findings(llm, *text_ids(llm, None, tokens), tokens, range(llm.engine.config.num_hidden_layers)):
        if isinstance(one, Finding):
            results[one.check] = one
            if one.check == last:
                break
    return results


def failures(results: dict[str, Finding]) -> dict[str, str]:
    return {name: one.seen for name, one in results.items() if one.ok is False}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the demo model, with its tensors and keys of ``config.json`` changed."""

    def write(change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None, **keys: Any) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(trained_folder(), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def test_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speculation = '{"num_speculative_tokens": 2}'
    options = ["--tokens", str(TOKENS), "--device", "cpu", "--max-model-len", "2048", "--cache-memory", "64MiB"]
    main(["check", "demo", *options, "--speculative-config", speculation, "--json", str(tmp_path / "c.json")])
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "c.json").read_text())
    ok = {one["check"]: one["ok"] for one in report["results"]}
    assert ok.pop("config") is None and set(ok.values()) == {True} and report["complete"]
    cases = {"prefill", "decode", "prefix hit, device", "prefix hit, host", "prefix hit, disk", "preempted", "drafts"}
    assert cases <= set(ok) and {one["case"] for one in report["agreements"]} == cases
    assert max(max(one["attention"], one["feed_forward"]) for one in report["agreements"]) < 1e-4
    at = {position for one in report["agreements"] for position in one["positions"]}
    assert {254, 255, 256, 257, 383, 384, 697, 698} <= at, "around index_topk and a page's border, and the last ones"
    for one in report["recalls"]:
        assert one["selected"] > 0.97 > one["recent"] > one["random"] and one["unchanged"]["INT8 weights"] > 0.95
    assert "what to do" not in out and re.search(r"layer 2, 64 to 511 +\d+\.\d%", out)


@pytest.mark.parametrize(
    "model_type, keys, options",
    [
        ("deepseek_v32", {}, {}),
        ("deepseek_v32", {}, {"dtype": "bfloat16"}),
        ("deepseek_v32", {}, {"batch_invariant": True}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}, {}),
        ("deepseek_v3", {}, {}),
    ],
)
def test_random_checkpoints(
    model_type: str, keys: dict[str, Any], options: dict[str, Any], oracle: Callable[..., Oracle]
) -> None:
    with LLM(oracle(model_type, **keys).folder, page_size=16, **OPTIONS | {"max_model_len": 300} | options) as llm:
        results = checked(llm, 300)
    assert failures(results) == {}
    assert results["text"].ok is None and "tokenizer" in results["text"].seen
    assert results["sparsity"].ok is (None if model_type == "deepseek_v3" else True)
    assert results["prefix hit, device"].ok and results["prefix hit, disk"].seen == "no cache_folder"
    assert ("recall, layer 1" in results) is (model_type == "deepseek_v32"), "layer 1 of GLM shares a selection"


@pytest.mark.parametrize("format", ["int8", "int4-experts", "FP8 caches"])
def test_formats(format: str, tmp_path: Path, run_script: Callable[..., Any]) -> None:
    folder, options = trained_folder(), {}
    if format == "FP8 caches":
        options = {"kv_cache_dtype": "fp8"}
    else:
        folder = tmp_path / "model"
        assert run_script("convert", trained_folder(), folder, "--quantize", format).returncode == 0
    with LLM(folder, **OPTIONS | options) as llm:
        results = checked(llm, 400, last="drafts")
    assert failures(results) == {} and results["tensors"].ok and results["prefix hit, device"].ok


@pytest.mark.parametrize(
    "fault, where, named",
    [
        ("index_topk", "prefill", "128 tokens are selected at position 256"),
        ("rope", "decode", "it is that with rope_interleave=False: the form of RoPE is swapped"),
        ("index rope", "prefill", "index_rope_interleaved=True: the form of the indexer's RoPE is swapped"),
        ("experts", "prefill", "the order of the experts is another"),
        ("router", "decode", "it routes otherwise"),
        ("head weights", "preempted", "its index keys or queries are others, or missing"),
        ("latent norm", "prefix hit, device", "the cached latent rows, or a projection, are others"),
    ],
)
def test_a_fault_of_the_engine(fault: str, where: str, named: str, demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = demo.engine.model.layers[1]
    config, attention, experts = demo.engine.config, layer.attention, layer.moe.experts
    changed: torch.Tensor | None = None
    if fault == "index_topk":
        monkeypatch.setattr(attention.indexer, "config", replace(config, index_topk=128))
    elif fault == "rope":
        monkeypatch.setattr(attention, "config", replace(config, rope_interleaved=False))
    elif fault == "index rope":
        monkeypatch.setattr(attention.indexer, "config", replace(config, index_rope_interleaved=True))
    elif fault == "experts":
        monkeypatch.setattr(experts, "gate_up", experts.gate_up.roll(3, dims=0))
        monkeypatch.setattr(experts, "down", experts.down.roll(3, dims=0))
    else:
        changed = {
            "router": layer.moe.bias,
            "head weights": attention.indexer.weights_proj.matrix,
            "latent norm": attention.kv_a_norm,
        }[fault]
    before = None if changed is None else changed.clone()
    with torch.inference_mode():
        if changed is not None:
            changed.copy_({"router": changed.flip(0), "head weights": changed.abs()}.get(fault, 1.1 * changed))
        wrong = failures(checked(demo, last="drafts"))
        if changed is not None and before is not None:
            changed.copy_(before)
    assert where in wrong and "layer 1: " in wrong[where] and named in wrong[where], wrong
    assert "layer 0" not in "".join(wrong.values())


def test_pages_restored_without_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = KVCache.page_words
    monkeypatch.setattr(KVCache, "page_words", lambda self: [pools[:1] for pools in whole(self)])
    with LLM("demo", host_cache_memory="32MiB", **OPTIONS) as llm:
        wrong = failures(checked(llm, last="drafts"))
    assert {"prefix hit, host"} <= set(wrong) <= {"prefix hit, host", "preempted"}, wrong
    assert "its index keys or queries are others, or missing" in wrong["prefix hit, host"]
    assert "the prefill is right: it is the cache" in wrong["prefix hit, host"]


def test_scales_that_the_engine_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = reader.dequantize_blocks
    monkeypatch.setattr(
        reader, "dequantize_blocks", lambda codes, scales, *rest: scaled(codes, torch.ones_like(scales), *rest)
    )
    with LLM("demo", **OPTIONS) as llm:
        wrong = failures(checked(llm, last="drafts"))
    assert "as if scales of weights were not applied" in wrong["prefill"], wrong


@pytest.mark.parametrize(
    "keys, tokens, where, named",
    [
        ({"rope_interleave": False}, 400, "text", "rope_interleaved=True is better"),
        ({"routed_scaling_factor": 2.5}, 400, "text", "routed_scaling_factor=1.0 is better"),
        ({"indexer_rope_interleave": True}, 700, "recall, layer 0", "the form of the indexer's RoPE is swapped"),
        ({"index_topk": 4}, 400, "recall, layer 1", "index_topk is too small"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_fault_of_config_json(
    keys: dict[str, Any], tokens: int, where: str, named: str, checkpoint: Callable[..., Path]
) -> None:
    with LLM(checkpoint(**keys), **OPTIONS) as llm:
        wrong = failures(checked(llm, tokens))
    assert where in wrong and named in wrong[where], wrong


def test_an_indexer_that_config_json_hides(checkpoint: Callable[..., Path]) -> None:
    with LLM(checkpoint(model_type="deepseek_v3"), **OPTIONS) as llm:
        wrong = failures(checked(llm, 100, last="sparsity"))
    assert "model.layers.0.self_attn.indexer" in wrong["tensors"]
    assert "not in use: the checkpoint has model.layers.0.self_attn.indexer" in wrong["sparsity"]


def zero_keys(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.indexer.wk.weight"].view(torch.uint8).zero_()


def no_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"].fill_(1)


def shuffled(tensors: dict[str, torch.Tensor]) -> None:
    def moved(name: str) -> str:
        return re.sub(r"(layers\.2\..*experts\.)(\d+)", lambda m: f"{m[1]}{(int(m[2]) + 5) % 16}", name)

    new = {moved(name): tensor for name, tensor in tensors.items()}
    tensors.update(new)


def test_faults_of_the_tensors(checkpoint: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        zero_keys(tensors)
        shuffled(tensors)

    with LLM(checkpoint(change), **OPTIONS) as llm:
        wrong = failures(checked(llm, 1400))
    assert "indexer.wk.weight is all zeros" in wrong["weights"]
    assert "worse than the last tokens: the indexer's weights are damaged" in wrong["recall, layer 1"]
    assert "their order is another" in wrong["experts, layer 2"] and "experts, layer 1" not in wrong


def test_scales_that_are_missing(checkpoint: Callable[..., Path]) -> None:
    with LLM(checkpoint(no_scales), **OPTIONS) as llm:
        wrong = failures(checked(llm, last="weights"))
    assert "o_proj.weight_scale_inv is 1 everywhere" in wrong["weights"]
    assert re.search(r"o_proj.weight multiplies by \S+, as if its scales were not applied", wrong["weights"])


def test_a_released_model_with_another_index_topk() -> None:
    for name in ("deepseek_v32", "glm_moe_dsa", "deepseek_v3"):
        assert evidence.unlike_released(ModelConfig.from_dict(released_config(name))) == []
    (differs,) = (
        evidence.unlike_released(ModelConfig.from_dict(released_config("deepseek_v32") | {"index_topk": 1024})) or []
    )
    assert differs == "index_topk is 1024, that of the released model 2048"


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    for options, text in (
        (["--layers", "3"], "numbers from 0 to 2"),
        (["--tokens", "9000"], "--tokens 9000 is not possible: 16 to 1024"),
        (["--load-format", "dummy"], "load_format"),
    ):
        with pytest.raises(SystemExit):
            main(["check", "demo", "--device", "cpu", "--max-model-len", "1024", *options])
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "dsa_engine", "check", "demo", "--device", "cpu", "--tokens", "400", "--cache-memory", "64MiB"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command += ["--max-model-len", "1024", "--json", str(tmp_path / "c.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "c.json").read_text())
    ok = {one["check"]: one["ok"] for one in report["results"]}
    assert report["world_size"] == 2 and ok["prefix hit, disk"] and ok["preempted"] and ok["tensors"]
    assert {one["layer"] for one in report["agreements"]} == {0, 1, 2} and done.stdout.count("prefill") == 1
