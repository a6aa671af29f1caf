"""``bench_prefill.py`` in one process, on small inputs; under torchrun: distributed/scripts/test_scripts.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsa_engine import LLM
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.requests import random_prompt

Run = Callable[..., Any]


def test_bench_prefill_reports_every_length(run_alone: Run, tmp_path: Path) -> None:
    outputs = {name: tmp_path / f"out.{name}" for name in ("json", "npy", "png", "trace")}
    done = run_alone(
        *("bench_prefill.py", "--input-len", "300,700", "--warmup", 0, "--repeat", 2, "--json", outputs["json"]),
        *("--dump-logits", outputs["npy"], "--plot", outputs["png"], "--profile", outputs["trace"]),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(outputs["json"].read_text())
    assert result["world_size"] == 1 and result["dtype"] == "float32" and "torch" in result["versions"]
    assert [r["input_len"] for r in result["results"]] == [300, 700]
    for r in result["results"]:
        assert 0 < r["min_ttft_ms"] <= r["median_ttft_ms"] <= r["max_ttft_ms"] and r["p99_ttft_ms"] > 0
        assert r["attention_pairs"] == [r["input_len"] * (r["input_len"] + 1) // 2] and r["imbalance"] == 1
        assert r["peak_memory_bytes"][0] > 50e6
        stages = r["stage_ms"]["prefill"][0]
        assert all(stages[name] > 0 for name in ("MLA prolog", "lightning indexer", "MLA epilog", "MoE experts"))
        # Stages are exclusive, so together they are the time of the run that was watched.
        assert sum(stages.values()) == pytest.approx(r["watched_ms"], rel=0.05)
    llm = LLM("demo-random", device="cpu")
    expected = prefill(llm.engine, random_prompt(llm.engine, 700))
    assert np.load(outputs["npy"]) == pytest.approx(expected.numpy(), abs=1e-4)
    assert outputs["png"].read_bytes().startswith(b"\x89PNG")
    names = {event.get("name") for event in json.loads(outputs["trace"].read_text())["traceEvents"]}
    assert {"MLA prolog", "indexer prolog", "lightning indexer", "sparse flash attention", "MLA epilog"} <= names
    assert "median TTFT ms" in done.stdout and "lightning indexer" in done.stdout


def test_bench_prefill_takes_a_text_and_a_model_of_configuration_only(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("word " * 100)
    done = run("bench_prefill.py", "--model", "demo-random", "--prompt-file", text, "--warmup", 0, "--repeat", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("501 ")  # bytes, and the beginning of the sentence
    folder = tmp_path / "model"
    made = run("make-checkpoint", "--config", "demo", "--output", folder)
    assert made.returncode == 0, made.stderr
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    options = ["--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}', "--dtype", "bfloat16"]
    done = run("bench_prefill.py", "--model", folder, "--input-len", 300, "--warmup", 0, "--repeat", 1, *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "short, long", [(2048, 8192), pytest.param(8192, 32768, marks=pytest.mark.slow)], ids=["8K", "32K"]
)
def test_prefill_stays_under_1500_mb(run_alone: Run, tmp_path: Path, short: int, long: int) -> None:
    """With one layer of each kind: layers use the same memory after one another, and another two would add their caches
    (29 MB of 32K tokens) only."""
    peaks = {}
    for length in (short, long):
        report = tmp_path / f"{length}.json"
        options = ["--warmup", 0, "--repeat", 1, "--hf-overrides", '{"num_hidden_layers": 2}', "--json", report]
        done = run_alone("bench_prefill.py", "--input-len", length, *options)
        assert done.returncode == 0, done.stderr
        peaks[length] = json.loads(report.read_text())["results"][0]["peak_memory_bytes"][0]
    assert peaks[long] + 2 * long * (80 + 32) * 4 < 1.5e9
    assert peaks[long] < 4 * peaks[short]  # linear at most
