"""The scripts on several ranks: one report, balanced work, and the demo as `make demo` starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.requests import random_prompt

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def test_bench_prefill_on_four_ranks(torchrun: Callable[..., Any], demo_cache: Path, tmp_path: Path) -> None:
    report, logits = tmp_path / "out.json", tmp_path / "out.npy"
    options = ["--input-len", 1024, "--warmup", 0, "--repeat", 1, "--moe-dispatch", "all_gather"]
    done = torchrun(4, SCRIPTS / "bench_prefill.py", *options, "--json", report, "--dump-logits", logits)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("median TTFT ms") == 1  # rank 0 reports for all
    result = json.loads(report.read_text())
    (measured,) = result["results"]
    assert result["world_size"] == 4 and len(measured["peak_memory_bytes"]) == len(measured["stage_ms"]["prefill"]) == 4
    assert sum(measured["attention_pairs"]) == 1024 * 1025 // 2
    assert measured["imbalance"] == pytest.approx(1.0, abs=0.005)
    llm = LLM("demo", device="cpu")
    assert np.load(logits) == pytest.approx(prefill(llm.engine, random_prompt(llm.engine, 1024)).numpy(), abs=1e-2)


def test_measure_tpot_on_two_ranks(torchrun: Callable[..., Any], demo_cache: Path) -> None:
    options = ["--input-len", 300, "--batch-size", 3, "--output-len", 4, "--repeat", 1]
    done = torchrun(2, SCRIPTS / "measure_tpot.py", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("median TPOT ms") == 1


def test_commands_on_two_ranks(fork_ranks: Callable[..., Any], demo_cache: Path) -> None:
    """Rank 0 reads and prints, the other rank follows; the tokens are those of one process."""
    options = ["--temperature", 0, "--device", "cpu", "--max-model-len", 400]
    llm = LLM("demo", device="cpu", max_model_len=400)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    done = fork_ranks(2, "command.py", "generate", "--prompt", "key 4821 is 97. key", "--max-tokens", 6, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.generate("key 4821 is 97. key", params)[0].text + "\n"
    lines = "key 4821 is 97\nWhat is key 4821?\n"
    done = fork_ranks(2, "command.py", "chat", "--max-tokens", 6, *options, stdin=lines)
    assert done.returncode == 0, done.stderr
    messages, answers = [], []
    for text in ("key 4821 is 97", "What is key 4821?"):
        messages.append({"role": "user", "content": text})
        answers.append(llm.chat(messages, params)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert done.stdout == "".join(f"{answer}\n" for answer in answers)


def test_a_bad_option_is_said_once(torchrun: Callable[..., Any], demo_cache: Path) -> None:
    done = torchrun(3, SCRIPTS / "bench_prefill.py", "--cp-size", 2)
    assert done.returncode != 0
    assert done.stderr.count("error: cp_size 2 does not divide the world size 3") == 1


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    document, report = tmp_path / "document.txt", tmp_path / "out.json"
    document.write_text("A long story of many words.\n" * 400)
    options = ["--nproc-per-node", "2", "--tokens", "1500", "--prompt-file", str(document), "--json", str(report)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / "demo.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for words in ("tokens on 2 ranks", "attention imbalance", "largest difference", "question: What is key"):
        assert words in done.stdout, done.stdout
    result = json.loads(report.read_text())
    assert result["right"] and "found, and right" in done.stdout and result["answer"] == result["fact"]
    assert result["relative_difference"] < 1e-3
