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
from dsa_engine.commands.check.checks import findings
from dsa_engine.commands.check.command import text_ids
from dsa_engine.commands.doctor.checks import Finding
from dsa_engine.demo import trained_folder
from dsa_engine.kernels.runtime import cpu
from dsa_engine.weights import reader
from oracles import Oracle

TOKENS = 700
OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 2048, "cache_memory": "64MiB"}


def checked(llm: LLM, tokens: int = TOKENS) -> dict[str, Finding]:
    config = llm.engine.config
    ids = text_ids(llm.tokenizer if llm.has_tokenizer else None, config.vocab_size, None, tokens)
    results = findings(llm.engine, llm.folder, ids, llm.has_tokenizer, range(config.num_hidden_layers))
    return {one.check: one for one in results if isinstance(one, Finding)}


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
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "c.json").read_text())
    cases = {"prefill", "decode", "prefix hit", "preempted", "drafts"}
    assert {one["case"] for one in report["agreements"]} == cases and report["complete"]
    names = {one["check"] for one in report["results"] if one["ok"]}
    assert names == {"tensors", "sparsity", "ties", "text"} | {f"layer {layer}" for layer in range(3)}
    at = {position for one in report["agreements"] for position in one["positions"]}
    assert {254, 255, 256, 257, 383, 384, 697, 698} <= at, "around index_topk and a page's border, and the last ones"
    for one in report["agreements"]:
        assert max(one["attention"], one["feed_forward"]) < 1e-4 and one["experts"] == (1.0 if one["layer"] else None)
        assert one["mass"] is None or one["selection"] > 0.999 and one["mass"] > max(0.97, one["random"])
    assert "what to do" not in captured.out
    (line,) = re.findall("layer 2 .*", captured.out)
    assert all(words in line for words in ("in attention", "of the selection", "of the experts", "attention's mass"))
    assert "WARNING" not in captured.err, "the check preempts requests itself"


COMPILED = pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler, or DSA_ENGINE_NATIVE=0")


@pytest.mark.parametrize(
    "model_type, keys, options",
    [
        ("deepseek_v32", {}, {}),
        ("deepseek_v32", {"index_n_heads": 4}, {}),
        ("deepseek_v32", {}, {"dtype": "bfloat16"}),
        pytest.param("deepseek_v32", {}, {"batch_invariant": True}, marks=COMPILED),
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
    if model_type == "deepseek_v32":  # a random model's scores are often exactly 0, with few heads of the indexer
        percent = float(results["ties"].seen.partition("%")[0])
        assert percent > 1 if keys else percent < 1
    assert ("mass" in results["layer 1"].seen) is (model_type == "deepseek_v32"), "layer 1 of GLM shares a selection"


@pytest.mark.parametrize("format", ["int8", "int4-experts", "FP8 caches"])
def test_formats(format: str, tmp_path: Path, run_script: Callable[..., Any]) -> None:
    folder, options = trained_folder(), {}
    if format == "FP8 caches":
        options = {"kv_cache_dtype": "fp8"}
    else:
        folder = tmp_path / "model"
        assert run_script("convert", trained_folder(), folder, "--quantize", format).returncode == 0
    with LLM(folder, **OPTIONS | options) as llm:
        results = checked(llm, 400)
    assert failures(results) == {} and results["tensors"].ok


@pytest.mark.parametrize(
    "fault, where, named",
    [
        ("index_topk", "prefill", "selection: 128 tokens, index_topk is 256"),
        ("rope", "decode", "attention: errors up to"),
        ("index rope", "prefill", "selection: 256 tokens"),
        ("experts", "prefill", "experts: errors up to"),
        ("router", "decode", "router: "),
        ("head weights", "preempted", "selection: 256 tokens"),
        ("latent norm", "prefix hit", "attention: errors up to"),
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
        for name in ("gate_up", "down"):
            monkeypatch.setattr(experts, name, (getattr(experts, name)[0].roll(3, dims=0),))
    else:
        changed = {
            "router": layer.moe.router.bias,
            "head weights": attention.indexer.weights_proj.matrix,
            "latent norm": attention.kv_a_norm,
        }[fault]
    before = None if changed is None else changed.clone()
    with torch.inference_mode():
        if changed is not None:
            changed.copy_({"router": changed.flip(0), "head weights": changed.abs()}.get(fault, 1.1 * changed))
        wrong = failures(checked(demo))
        if changed is not None and before is not None:
            changed.copy_(before)
    assert f"{where}: {named}" in wrong["layer 1"] and "layer 0" not in wrong, wrong


def test_scales_that_the_engine_does_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = reader.dequantize_blocks
    monkeypatch.setattr(
        reader, "dequantize_blocks", lambda codes, scales, *rest: scaled(codes, torch.ones_like(scales), *rest)
    )
    with LLM("demo", **OPTIONS) as llm:
        wrong = failures(checked(llm))
    assert re.search(r"prefill: attention: .*e\+\d+ times as large", wrong["layer 0"]), wrong


def test_pages_that_lose_their_index_keys(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix hit reads rows that no step wrote: the prefill is right, and what follows names the cache."""
    names, begin = demo.engine.scheduler.prefix_cache, demo.engine.cache.index_keys
    keys, admitted = begin[1], names.admitted
    assert keys is not None

    def forgotten(request: Any, pages: int) -> None:
        admitted(request, pages)
        if pages:
            keys.zero_()

    monkeypatch.setattr(names, "admitted", forgotten)
    wrong = failures(checked(demo))
    assert "the prefill is right, so it is the cache or the form of the step; prefix hit: sel" in wrong["layer 1"], (
        wrong
    )


def test_an_indexer_that_config_json_hides(checkpoint: Callable[..., Path]) -> None:
    with LLM(checkpoint(model_type="deepseek_v3"), **OPTIONS) as llm:
        wrong = failures(checked(llm, 100))
    assert "model.layers.0.self_attn.indexer" in wrong["tensors"]
    assert "not in use: the checkpoint has model.layers.0.self_attn.indexer" in wrong["sparsity"]


def test_damaged_tensors_of_the_indexer(checkpoint: Callable[..., Path]) -> None:
    """Engine and page agree on them; the mass that is carried tells."""

    def zero_keys(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.indexer.wk.weight"].view(torch.uint8).zero_()

    with LLM(checkpoint(zero_keys), **OPTIONS) as llm:
        wrong = failures(checked(llm, 1400))
    assert set(wrong) == {"layer 1"} and "of dense attention's mass" in wrong["layer 1"], wrong


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
    assert report["world_size"] == 2 and ok["tensors"] and done.stdout.count("layer 2 ") == 1
    compared = {(one["layer"], one["case"]) for one in report["agreements"]}
    assert compared == {
        (layer, case) for layer in range(3) for case in ("prefill", "decode", "prefix hit", "preempted")
    }
