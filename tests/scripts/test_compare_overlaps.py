"""``compare_overlaps.py``: the features that it turns off, and its results after a failure or an interrupt."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.arguments import add_engine_arguments, llm_from
from dsa_engine.commands.bench import generation_benchmark, latency_command, prefill_command
from dsa_engine.measure import device
from dsa_engine.measure.emulation import arguments as emulation_arguments

Run = Callable[..., Any]


def test_what_is_turned_off_reaches_the_engine(demo_cache: Path) -> None:
    names = ("enforce_eager", "no_async_scheduling", "no_overlap_shared_expert", "no_overlap_indexer")
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    for off in (None, *names):
        options = [] if off is None else [f"--{off.replace('_', '-')}"]
        engine = llm_from(parser.parse_args(["--device", "cpu", "--cache-memory", "1MiB", *options])).engine
        runtime = engine.model.runtime
        on = (engine.options.async_scheduling, runtime.overlap_shared_expert, runtime.overlap_indexer)
        on_here = (engine.options.enforce_eager, *(not x for x in on))
        assert on_here == tuple(name == off for name in names)


def test_compare_overlaps(run: Run, tmp_path: Path) -> None:
    """On a CPU there is nothing to turn off, but the requested rows are measured, here for an emulated rank."""
    names = ("nothing", "async scheduling", "two batches", "all of them")
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
    two_batches = ("--enable-dbo", "--dbo-decode-token-threshold", 2)
    done = run("compare_overlaps.py", *common, "--emulate-world", 2, "--batch-size", 4, *two_batches)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    by_run = {(r["turned_off"], r["input_len"]): r for r in result["results"]}
    assert len(by_run) == 8 and result["emulated"]["world_size"] == 2 and result["complete"]
    for name in names:
        times = [by_run[name, n]["median_computed_tpot_ms"] for n in (64, 300)]
        assert min(times) > 0
        base = [by_run["nothing", n]["median_computed_tpot_ms"] for n in (64, 300)]
        row = next(line for line in done.stdout.splitlines() if line.startswith(name))
        for ms, its_base in zip(times, base, strict=True):
            assert f"{ms:.2f} ({ms / its_base:.2f}x)" in row
    assert done.stdout.startswith("EMULATED: rank 0 of 2")
    # Two batches exchange twice, so their collectives take longer.
    exchanged = {name: by_run[name, 64]["tpot_ms"]["modelled_communication"] for name in names}
    assert exchanged["nothing"] == exchanged["async scheduling"] > 1.1 * exchanged["two batches"]
    assert exchanged["two batches"] == exchanged["all of them"]
    waits = done.stdout.partition("waits of communication")[2]
    for name in names:
        ms = by_run[name, 64]["tpot_ms"]
        assert f"{ms['overlapped'] - ms['computed']:.3f} of {exchanged[name]:.3f}" in waits


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
    assert table[script] in done.stdout and not re.search(r"(?<!ms at )(?<![\d.])128(?![\d.])", done.stdout)


def test_a_variant_that_loses_the_device_does_not_lose_the_others(
    run: Run, run_script: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the engine does not start. Another process measures the others, and adds to the same file."""
    start, report = emulation_arguments.measured_llm, tmp_path / "out.json"
    stale = {"results": [{"turned_off": "all of them", "input_len": 64, "median_tpot_ms": 1.0}], "failed": {}}
    report.write_text(json.dumps(stale))  # results of another run, without --add

    def loses_the_device(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def in_another_process(command: list[str]) -> int:
        with monkeypatch.context() as there:
            there.setattr(torch.cuda, "is_initialized", lambda: False)
            there.setattr(emulation_arguments, "measured_llm", start)
            return run_script(Path(command[1]).name, *command[2:]).returncode

    monkeypatch.setattr(emulation_arguments, "measured_llm", loses_the_device)
    monkeypatch.setattr(device, "is_lost", lambda device: True)
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
    done = run("compare_overlaps.py", "--only", "two batches")
    assert done.returncode == 2 and "--only 'two batches' needs --enable-dbo, which" in done.stderr
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
