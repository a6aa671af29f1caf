"""``measure_ttft.py`` and ``measure_tpot.py`` in one process, also as one rank of many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.commands.bench import command

Run = Callable[..., Any]


def test_latency_scripts(run: Run, tmp_path: Path) -> None:
    for script, metric in (("measure_ttft.py", "ttft"), ("measure_tpot.py", "tpot")):
        report, trace = (tmp_path / f"{metric}.{kind}" for kind in ("json", "trace"))
        options = ["--input-len", "100,300", "--batch-size", "1,3", "--repeat", 2]
        options += ["--json", report, "--profile", trace]
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
            assert re.search(r"300 × 3: the steps of a run took .* ms beyond the median step each", done.stdout)
            spent = sum(r["itl_samples_ms"])
            assert sum(r["tpot_samples_ms"]) * 3 + sum(r["beyond_median_samples_ms"]) == pytest.approx(spent, abs=0.01)
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
    """Every output says what is emulated and what is scaled."""
    fewer = ["--hf-overrides", '{"num_hidden_layers": 3}', "--load-format", "dummy"]
    for script, metric in (("bench_prefill.py", "ttft"), ("measure_ttft.py", "ttft"), ("measure_tpot.py", "tpot")):
        report = tmp_path / f"{script}.json"
        options = ["--input-len", 400, "--repeat", 1, "--warmup", 0, "--json", report]
        options += ["--emulate-world", 12, "--emulate-rank", 7, *fewer]
        done = run(script, *options, *(["--output-len", 3, "--batch-size", 12] if metric == "tpot" else []))
        assert done.returncode == 0, done.stderr
        assert "EMULATED: rank 7 of 12, in one process" in done.stdout and "SCALED, not measured" in done.stdout
        result = json.loads(report.read_text())
        assert result["emulated"] == {"world_size": 12, "rank": 7} and result["world_size"] == 1
        (r,) = result["results"]
        scaled = r["scaled_to_full_depth"]
        assert (scaled["num_hidden_layers"], scaled["measured_layers"]) == (4, 3)
        difference = r[f"median_{metric}_ms"] - scaled[f"fewer_{metric}_ms"]  # of layer 3, as the fourth would take
        assert scaled[f"{metric}_ms"] == pytest.approx(r[f"median_{metric}_ms"] + difference)


def test_fewer_layers_are_scaled_on_a_line_of_their_own(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    options = ["--hf-overrides", '{"num_hidden_layers": 2}', "--load-format", "dummy", "--json", report]
    done = run("measure_tpot.py", "--input-len", 300, "--output-len", 3, "--repeat", 1, "--warmup", 0, *options)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SCALED, not measured: 300 × 1")]
    assert "with all 4 layers instead of 2: TPOT" in line
    (r,) = json.loads(report.read_text())["results"]
    assert "emulated" not in json.loads(report.read_text())
    assert r["scaled_to_full_depth"]["fewer_layers"] == 1


@pytest.mark.parametrize("script", ["measure_tpot.py", "bench_prefill.py"])
def test_what_was_measured_is_not_lost_to_an_interrupt(
    script: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the tables have the first length; Ctrl-C, or a limit in time, came in the second."""
    name = {"measure_tpot.py": "measure_latency", "bench_prefill.py": "measure_prefill"}[script]
    measure, calls = getattr(command, name), iter(range(2))

    def interrupted(*args: Any, **named: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return measure(*args, **named)

    monkeypatch.setattr(command, name, interrupted)
    report = tmp_path / "out.json"
    options = [] if script == "bench_prefill.py" else ["--output-len", 3]
    done = run(script, "--input-len", "64,128", "--repeat", 1, "--json", report, *options)
    assert done.returncode == 130, done.stderr
    result = json.loads(report.read_text())
    assert result["complete"] is False
    assert [r["input_len"] for r in result["results"]] == [64]
    assert "64 × 1" in done.stdout and not re.search(r"(?<!ms at )(?<![\d.])128(?![\d.])", done.stdout)
