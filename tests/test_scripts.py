"""What a user starts from a shell, in one process, on small inputs; under torchrun: distributed/test_scripts.py."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsa_engine import LLM
from dsa_engine.arguments import add_engine_arguments, llm_from
from dsa_engine.cli import main as dsa_engine_command
from dsa_engine.measure import generation_benchmark, latency_command, lost_device, prefill_command
from dsa_engine.measure.emulation import arguments as emulation_arguments
from dsa_engine.measure.random_prompt import random_prompt

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
Run = Callable[..., Any]


def with_model(script: str, arguments: tuple[object, ...]) -> list[object]:
    """The random model, whose shapes the tests know, where a script measures one and none is named."""
    measures = script.startswith(("bench_prefill", "measure_", "compare_"))
    return [*arguments] if not measures or "--model" in arguments else [*arguments, "--model", "demo-random"]


@pytest.fixture
def run(run_script: Run) -> Run:
    """In this process."""
    return lambda script, *arguments: run_script(script, *with_model(script, arguments))


@pytest.fixture
def run_alone(demo_cache: Path) -> Run:
    """In a process of its own, for what is said of a process: its memory."""

    def start(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / script), *map(str, with_model(script, arguments))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)

    return start


def test_bench_prefill_reports_every_length(run_alone: Run, tmp_path: Path) -> None:
    outputs = {name: tmp_path / f"out.{name}" for name in ("json", "npy", "png", "trace")}
    done = run_alone(
        *("bench_prefill.py", "--seq-len", "300,700", "--warmup", 0, "--repeat", 2, "--json", outputs["json"]),
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
        stages = r["stage_ms"][0]
        assert all(stages[name] > 0 for name in ("MLA prolog", "lightning indexer", "MLA epilog", "MoE experts"))
        # Stages are exclusive, so together they are the time of the run that was watched.
        assert sum(stages.values()) == pytest.approx(r["watched_ms"], rel=0.05)
    llm = LLM("demo-random", device="cpu")
    expected = llm.engine.prefill(random_prompt(llm.engine, 700))
    assert np.load(outputs["npy"]) == pytest.approx(expected.numpy(), abs=1e-4)
    assert outputs["png"].read_bytes().startswith(b"\x89PNG")
    names = {event.get("name") for event in json.loads(outputs["trace"].read_text())["traceEvents"]}
    assert {"MLA prolog", "indexer prolog", "lightning indexer", "sparse flash attention", "MLA epilog"} <= names
    assert "700 tokens: TTFT" in done.stdout and "lightning indexer" in done.stdout
    assert "in one more run that was watched, which took" in done.stdout


def test_bench_prefill_takes_a_text_and_a_model_of_configuration_only(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("word " * 100)
    done = run("bench_prefill.py", "--model", "demo-random", "--prompt-file", text, "--warmup", 0, "--repeat", 1)
    assert done.returncode == 0, done.stderr
    assert "501 tokens: TTFT" in done.stdout  # bytes, and the beginning of the sentence
    folder = tmp_path / "model"
    made = run("make_checkpoint.py", "--config", "demo", "--output", folder)
    assert made.returncode == 0, made.stderr
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    options = ["--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 2}', "--dtype", "bfloat16"]
    done = run("bench_prefill.py", "--model", folder, "--seq-len", 300, "--warmup", 0, "--repeat", 1, *options)
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
        done = run_alone("bench_prefill.py", "--seq-len", length, *options)
        assert done.returncode == 0, done.stderr
        peaks[length] = json.loads(report.read_text())["results"][0]["peak_memory_bytes"][0]
    assert peaks[long] + 2 * long * (80 + 32) * 4 < 1.5e9
    assert peaks[long] < 4 * peaks[short]  # linear at most


def test_latency_scripts(run: Run, tmp_path: Path) -> None:
    for script, metric in (("measure_ttft.py", "ttft"), ("measure_tpot.py", "tpot")):
        report, plot, trace = (tmp_path / f"{metric}.{kind}" for kind in ("json", "png", "trace"))
        options = ["--input-len", "100,300", "--batch-size", "1,3", "--repeat", 2]
        options += ["--json", report, "--plot", plot, "--profile", trace]
        done = run(script, *options, *(["--output-len", 4] if metric == "tpot" else []))
        assert done.returncode == 0, done.stderr
        results = json.loads(report.read_text())["results"]
        assert [(r["input_len"], r["batch_size"]) for r in results] == [(100, 1), (100, 3), (300, 1), (300, 3)]
        for r in results:
            assert 0 < r[f"median_{metric}_ms"] <= r[f"p90_{metric}_ms"] <= r[f"p99_{metric}_ms"]
            assert r["input_throughput"] == pytest.approx(
                1e3 * r["input_len"] * r["batch_size"] / r["median_prefill_ms"]
            )
            assert r["stage_ms"]["prefill"][0]["MLA prolog"] > 0
            assert r["median_prefill_ms"] >= r["median_ttft_ms"] > 0
            assert ("decode" in r["stage_ms"]) == (metric == "tpot")
        if metric == "tpot":
            assert "decode stage" in done.stdout and r["output_throughput_per_device"] == r["output_throughput"]
            assert 0 < r["min_itl_ms"] <= r["median_itl_ms"] <= r["p99_itl_ms"]
        assert plot.read_bytes().startswith(b"\x89PNG")
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert {"schedule", "launch", "read tokens", "lightning indexer"} <= names
        assert f"median {metric.upper()} ms" in done.stdout


def test_caches_filled_instead_of_computed(run: Run, tmp_path: Path) -> None:
    """TPOT at a length without its prefill, which would take thousands of times as long."""
    report = tmp_path / "tpot.json"
    options = ["--fill-cache", "random", "--output-len", 3, "--repeat", 1, "--json", report]
    done = run("measure_tpot.py", "--input-len", 3000, "--batch-size", "1,2", *options)
    assert done.returncode == 0, done.stderr
    for r in json.loads(report.read_text())["results"]:
        assert r["median_tpot_ms"] > 0 and r["cache"] == "filled with random rows"
        assert "median_ttft_ms" not in r and list(r["stage_ms"]) == ["decode"]
    done = run("measure_ttft.py", "--input-len", 300, "--fill-cache", "random")
    assert done.returncode == 2 and "unrecognized arguments: --fill-cache" in done.stderr


def test_one_rank_of_many(run: Run, tmp_path: Path) -> None:
    """Every output says what is emulated, modelled and scaled, and no measured name holds any of it."""
    loads, links = tmp_path / "loads.json", tmp_path / "links.json"
    loads.write_text(json.dumps([1 + i % 2 for i in range(24)]))
    links.write_text(json.dumps({"between": {"name": "Ethernet", "bandwidth_gb_s": 12.5}}))
    fewer = ["--hf-overrides", '{"num_hidden_layers": 3}', "--load-format", "dummy"]
    world = ["--emulate-world", 12, "--emulate-rank", 7, "--expert-loads", loads, "--links", links, *fewer]
    for script, metric in (("bench_prefill.py", "ttft"), ("measure_ttft.py", "ttft"), ("measure_tpot.py", "tpot")):
        report, plot = tmp_path / f"{script}.json", tmp_path / f"{script}.png"
        length = "--seq-len" if script == "bench_prefill.py" else "--input-len"
        options = [length, 400, "--repeat", 1, "--warmup", 0, "--json", report, "--plot", plot, *world]
        done = run(script, *options, *(["--output-len", 3, "--batch-size", 12] if metric == "tpot" else []))
        assert done.returncode == 0, done.stderr
        assert "EMULATED: rank 7 of 12, in one process, given expert loads; tokens mean nothing" in done.stdout
        assert "communication is modelled, not measured: NVLink 360 GB/s" in done.stdout
        assert "Ethernet 12.5 GB/s" in done.stdout and "SCALED, not measured" in done.stdout
        result = json.loads(report.read_text())
        about = result["emulated"]
        assert (about["world_size"], about["rank"], len(about["expert_loads"])) == (12, 7, 24)
        assert about["links"]["between"]["name"] == "Ethernet" and result["world_size"] == 1
        (r,) = result["results"]
        assert f"median_{metric}_ms" not in r and r[f"median_computed_{metric}_ms"] > 0
        times = r[f"{metric}_ms"]
        assert 0 < times["computed"] < times["overlapped"] <= times["not_overlapped"] + 1e-9
        scaled = r["scaled_to_full_depth"]
        assert (scaled["num_hidden_layers"], scaled["measured_layers"]) == (4, 3)
        assert scaled[f"{metric}_ms_computed"] > times["computed"]
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_what_is_turned_off_reaches_the_engine(demo_cache: Path) -> None:
    names = ("enforce_eager", "no_async_scheduling", "no_overlap_shared_expert", "no_overlap_indexer")
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    for off in (None, *names):
        options = [] if off is None else [f"--{off.replace('_', '-')}"]
        engine = llm_from(parser.parse_args(["--device", "cpu", "--cache-memory", "1MiB", *options])).engine
        runtime = engine.model.runtime
        on = (engine.options.async_scheduling, runtime.overlap_shared_expert, runtime.overlap_indexer)
        actual = (engine.options.enforce_eager, *(not x for x in on))
        assert actual == tuple(name == off for name in names)


def test_compare_overlaps(run: Run, tmp_path: Path) -> None:
    """On a CPU there is nothing to turn off, but what is asked for is measured, here of an emulated rank."""
    names = ("nothing", "async scheduling", "all of them")
    common = [
        "--only",
        ",".join(names),
        "--input-len",
        "64,300",
        "--output-len",
        4,
        "--repeat",
        1,
        "--json",
        tmp_path / "out.json",
    ]
    done = run("compare_overlaps.py", *common, "--emulate-world", 2, "--batch-size", 2)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    actual = {(r["turned_off"], r["input_len"]): r for r in result["results"]}
    assert len(actual) == 6 and result["emulated"]["world_size"] == 2 and result["complete"]
    for name in names:
        times = [actual[name, n]["median_computed_tpot_ms"] for n in (64, 300)]
        assert min(times) > 0
        base = [actual["nothing", n]["median_computed_tpot_ms"] for n in (64, 300)]
        row = next(line for line in done.stdout.splitlines() if line.startswith(name))
        for ms, its_base in zip(times, base, strict=True):
            assert f"{ms:.2f} ({ms / its_base:.2f}x)" in row
    assert done.stdout.startswith("EMULATED: rank 0 of 2")


@pytest.mark.parametrize("script", ["measure_tpot.py", "compare_overlaps.py", "bench_prefill.py"])
def test_what_was_measured_is_not_lost_to_an_interrupt(
    script: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the tables have the first length; Ctrl-C, or a limit in time, came in the second."""
    where, name = {
        "measure_tpot.py": (latency_command, "measure_latency"),
        "compare_overlaps.py": (generation_benchmark, "measure_latency"),
        "bench_prefill.py": (prefill_command, "measure_prefill"),
    }[script]
    measure, calls = getattr(where, name), iter(range(2))

    def interrupted(*args: Any, **named: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return measure(*args, **named)

    monkeypatch.setattr(where, name, interrupted)
    report, length = tmp_path / "out.json", "--seq-len" if script == "bench_prefill.py" else "--input-len"
    options = [] if script == "bench_prefill.py" else ["--output-len", 3]
    done = run(script, length, "64,128", "--repeat", 1, "--json", report, *options)
    assert done.returncode == 130, done.stderr
    result = json.loads(report.read_text())
    assert result["complete"] is False
    assert [r["input_len"] for r in result["results"]] == [64]
    table = {"measure_tpot.py": "64 × 1", "compare_overlaps.py": "(1.00x)", "bench_prefill.py": "64 tokens: TTFT"}
    assert table[script] in done.stdout and "128" not in done.stdout.replace("ms at 128", "")


def test_a_variant_that_loses_the_device_does_not_lose_the_others(
    run: Run, run_script: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one whose engine does not even start. Another process measures them, and adds to the same file."""
    start, report = emulation_arguments.measured_llm, tmp_path / "out.json"
    stale = {"results": [{"turned_off": "all of them", "input_len": 64, "median_tpot_ms": 1.0}], "failed": {}}
    report.write_text(json.dumps(stale))  # of another run: nobody has asked to add to it

    def loses_the_device(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def in_another_process(command: list[str]) -> int:
        with monkeypatch.context() as there:
            there.setattr(torch.cuda, "is_initialized", lambda: False)
            there.setattr(emulation_arguments, "measured_llm", start)
            return run_script(Path(command[1]).name, *command[2:]).returncode

    monkeypatch.setattr(emulation_arguments, "measured_llm", loses_the_device)
    monkeypatch.setattr(lost_device, "is_lost", lambda device: True)
    monkeypatch.setattr(subprocess, "call", in_another_process)
    options = ["--input-len", 64, "--output-len", 3, "--repeat", 1, "--json", report]
    done = run("compare_overlaps.py", *options, "--only", "nothing,CUDA graphs")
    assert done.returncode == 1, done.stderr
    result = json.loads(report.read_text())
    assert result["complete"] and [r["turned_off"] for r in result["results"]] == ["CUDA graphs"]
    assert result["failed"] == {"nothing": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    report.write_text("{}")
    done = run("compare_overlaps.py", *options, "--add")
    assert done.returncode == 2 and "out.json has no results that could be added to" in done.stderr
    done = run("compare_overlaps.py", "--only", "the light")
    assert done.returncode == 2 and "--only 'the light' is none of nothing, CUDA graphs" in done.stderr


@pytest.mark.slow
def test_a_variant_that_does_not_run_leaves_the_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = generation_benchmark.measure_latency

    def fails_with_graphs(llm: LLM, *args: Any, **named: Any) -> Any:
        if llm.engine.options.enforce_eager:
            return measure(llm, *args, **named)
        raise RuntimeError("CUDA error: graphs are broken\nand how")

    monkeypatch.setattr(generation_benchmark, "measure_latency", fails_with_graphs)
    report = tmp_path / "out.json"
    done = run("compare_overlaps.py", "--input-len", 64, "--output-len", 3, "--repeat", 1, "--json", report)
    assert done.returncode == 1 and "FAILED with nothing turned off: RuntimeError: CUDA error: graphs" in done.stdout
    result = json.loads(report.read_text())
    assert result["complete"] and [r["turned_off"] for r in result["results"]] == ["CUDA graphs", "all of them"]
    assert len(result["failed"]) == 4 and "and how" not in done.stdout


def test_fewer_layers_are_scaled_on_a_line_of_their_own(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    options = ["--hf-overrides", '{"num_hidden_layers": 2}', "--load-format", "dummy", "--json", report]
    done = run("measure_tpot.py", "--input-len", 300, "--output-len", 3, "--repeat", 1, "--warmup", 0, *options)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SCALED, not measured: 300 × 1")]
    assert "with all 4 layers instead of 2: TPOT" in line
    (r,) = json.loads(report.read_text())["results"]
    assert "emulated" not in json.loads(report.read_text())
    assert r["scaled_to_full_depth"]["tpot_ms"] > r["median_tpot_ms"]


def test_compare_transformers(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "compare.json"
    sizes = ["--seq-len", 300, "--context", 280, "--batch-size", 2, "--output-len", 4, "--repeat", 1]
    plot = tmp_path / "compare.png"
    done = run("compare_transformers.py", *sizes, "--threads", 1, "--json", report, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    prefill, decode = json.loads(report.read_text())["results"]
    assert prefill["relative_error"] < 1e-4 and decode["equal_tokens"] == decode["tokens"] == 8
    assert prefill["ratio"] > 0 and decode["transformers_peak_bytes"] > 0
    assert prefill["prefill_work"]["share_of_matmul"] > 0 and "of a matrix product (" in done.stdout


@pytest.mark.parametrize(
    "script, options, message",
    [
        ("bench_prefill.py", ["--seq-len", "0"], "give positive numbers separated by commas"),
        ("bench_prefill.py", ["--repeat", "0"], "--repeat must be at least 1"),
        ("bench_prefill.py", ["--hf-overrides", "{"], "--hf-overrides is not valid JSON"),
        ("bench_prefill.py", ["--prompt-file", "/nowhere/at/all"], "No such file"),
        ("bench_prefill.py", ["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        ("bench_prefill.py", ["--model", "/nowhere"], "no such model folder: /nowhere"),
        ("bench_prefill.py", ["--seq-len", "200000"], "max_model_len is 163840; shorten the prompt"),
        ("bench_prefill.py", ["--cache-memory", "1MB"], "the cache is too small for this request"),
        ("measure_tpot.py", ["--output-len", "1"], "--output-len must be at least 2"),
        ("measure_tpot.py", ["--emulate-world", "0"], "emulate_world must be a positive integer, not 0"),
        (
            "measure_ttft.py",
            ["--emulate-world", "4", "--emulate-rank", "4"],
            "one of the ranks 0 … 3 of emulate_world 4",
        ),
        ("measure_ttft.py", ["--emulate-rank", "1"], "--emulate-rank needs --emulate-world"),
        ("measure_ttft.py", ["--links", "x"], "--links needs --emulate-world"),
        ("measure_ttft.py", ["--emulate-world", "25"], "n_routed_experts 24 cannot be divided over 25 ranks"),
        ("measure_ttft.py", ["--emulate-world", "8", "--cp-size", "3"], "cp_size 3 does not divide the world size 8"),
        ("measure_ttft.py", ["--emulate-world", "2", "--links", "/nowhere/at/all"], "No such file"),
        ("measure_ttft.py", ["--emulate-world", "2", "--expert-loads", __file__], "is not valid JSON"),
        (
            "bench_prefill.py",
            ["--emulate-world", "2", "--dump-logits", "x.npy"],
            "logits of an emulated rank mean nothing",
        ),
        ("measure_tpot.py", ["--batch-size", "65", "--input-len", "10"], "the batch size 65 exceeds max_num_seqs 64"),
        (
            "measure_tpot.py",
            ["--input-len", "512", "--max-model-len", "514"],
            "512 tokens and up to 64 new ones exceed",
        ),
        ("measure_ttft.py", ["--json", "/"], "cannot write /: it is a folder"),
        ("measure_ttft.py", ["--plot", "x.pdf"], "give a name that ends in .png"),
        ("compare_overlaps.py", ["--repeat", "0"], "--repeat and --batch-size at least 1"),
        ("compare_overlaps.py", ["--batch-size", "65", "--input-len", "10"], "the batch size 65 exceeds"),
        ("compare_transformers.py", ["--threads", "0"], "must be at least 1"),
        ("evaluate.py", ["--plot", "x.pdf"], "give a name that ends in .png"),
        ("train_demo.py", ["--log", "/nowhere/at/all.jsonl"], "there is no folder /nowhere/at"),
        ("demo.py", ["--tokens", "0"], "--tokens must be at least 1"),
    ],
)
def test_bad_options_end_with_one_line(run: Run, script: str, options: list[str], message: str) -> None:
    done = run(script, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "option, content, message",
    [
        ("--expert-loads", "[1, 2]", "there are 2 expert loads, the model has 24 routed experts; give one for each"),
        ("--expert-loads", '{"0": 1}', "must hold a JSON list of numbers"),
        ("--expert-loads", json.dumps([30] + [1] * 23), "expert 0 has 56.6% of the load"),
        ("--expert-loads", json.dumps(["a"] * 24), "expert_loads must be numbers of at least 0"),
        ("--links", '{"inside": {"bandwidth_gb_s": -1}}', "inside.bandwidth_gb_s must be a number above 0, not -1"),
        ("--links", '{"pcie": {}}', "links has no key 'pcie'"),
    ],
)
def test_bad_files_of_an_emulated_run(run: Run, tmp_path: Path, option: str, content: str, message: str) -> None:
    path = tmp_path / "given.json"
    path.write_text(content)
    done = run("bench_prefill.py", "--emulate-world", "4", option, path)
    assert done.returncode == 2 and message in done.stderr and "given.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_command(demo_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dsa_engine_command(["generate", "--prompt", "def f():", "--max-tokens", "5", "--device", "cpu"])
    text = capsys.readouterr().out
    llm = LLM("demo", device="cpu")
    from dsa_engine import SamplingParams

    assert text == llm.generate("def f():", SamplingParams(temperature=0.0, max_tokens=5))[0].text + "\n"
    file = tmp_path / "prompt.txt"
    file.write_text("def f():")
    dsa_engine_command(["generate", "--prompt-file", str(file), "--max-tokens", "5", "--device", "cpu"])
    assert capsys.readouterr().out == text
    dsa_engine_command(["generate", "--prompt", "hi", "--chat", "--max-tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out


def test_info_command(demo_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "info.json"
    dsa_engine_command(["info", "demo-random", "--memory", "1GB", "--ranks", "2", "--json", str(report)])
    text = capsys.readouterr().out
    info = json.loads(report.read_text())
    assert f"{info['parameters']:,} parameters" in text and "cache per token" in text
    by_format = {row["weights"]: row for row in info["per_format"]}
    assert list(by_format) == ["fp8", "int8", "int4-experts", "bfloat16", "float32"]
    assert "fp8: as the checkpoint stores them" in text
    experts = 3 * 12 * 3 * 256 * 128  # layers, experts of a rank, matrices, their size: from 2 bytes to 4 + 1/8 bits
    saved = by_format["bfloat16"]["weight_bytes"] - by_format["int4-experts"]["weight_bytes"]
    assert saved == experts * 2 - experts // 2 - experts // 128 * 2
    row = by_format["bfloat16"]
    assert row["cache_bytes_per_token"] == 4 * (80 + 32) * 2
    assert row["tokens_that_fit"] == (10**9 - row["weight_bytes"]) // row["cache_bytes_per_token"]
    with pytest.raises(SystemExit, match="2"):
        dsa_engine_command(["info", "demo-random", "--ranks", "25"])
    assert "error: --ranks 25 is more than the 24 routed experts" in capsys.readouterr().err
