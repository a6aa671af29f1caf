"""``compare_overlaps.py``: the features that it turns off, and its results after a failure or an interrupt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.commands.bench import command, generation_benchmark

Run = Callable[..., Any]


def test_compare_overlaps(run: Run, tmp_path: Path) -> None:
    """On a CPU there is nothing to turn off, but every row is measured, here for an emulated rank."""
    sizes = ["--input-len", "64,300", "--output-len", 4, "--repeat", 1, "--batch-size", 4]
    done = run("compare_overlaps.py", *sizes, "--emulate-world", 2, "--enable-dbo", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    by_run = {(r["turned_off"], r["input_len"]): r for r in result["results"]}
    assert result["emulated"]["world_size"] == 2 and result["complete"] and len(by_run) == 2 * 6
    for (name, length), measured in by_run.items():
        ms, base = measured["median_tpot_ms"], by_run["nothing", length]["median_tpot_ms"]
        row = next(line for line in done.stdout.splitlines() if line.startswith(name))
        assert ms > 0 and f"{ms:.2f} ({ms / base:.2f}x)" in row
    assert done.stdout.startswith("EMULATED: rank 0 of 2")


@pytest.mark.parametrize("script", ["measure_tpot.py", "compare_overlaps.py", "bench_prefill.py"])
def test_what_was_measured_is_not_lost_to_an_interrupt(
    script: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and the tables have the first length; Ctrl-C, or a limit in time, came in the second."""
    where, name = {
        "measure_tpot.py": (command, "measure_latency"),
        "compare_overlaps.py": (generation_benchmark, "measure_latency"),
        "bench_prefill.py": (command, "measure_prefill"),
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
    table = {"measure_tpot.py": "64 × 1", "compare_overlaps.py": "(1.00x)", "bench_prefill.py": "64 × 1"}
    assert table[script] in done.stdout and not re.search(r"(?<!ms at )(?<![\d.])128(?![\d.])", done.stdout)
