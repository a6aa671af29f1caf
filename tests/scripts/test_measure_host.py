"""``measure_host.py``: its tables and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_measure_host(run_script: Callable[..., Any], tmp_path: Path) -> None:
    report, plot = tmp_path / "host.json", tmp_path / "host.png"
    sizes = ("--worlds", 2, "--requests", 3, "--steps", 4, "--prefill", "", "--waiting", "2x200")
    done = run_script("measure_host.py", *sizes, "--json", report, "--plot", plot)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())
    (decode,), (memory,) = results["decode"], results["memory"]
    assert decode["calls"] > 100 and 0 < decode["step_ms"] <= decode["max_ms"] and decode["turn_ms"] > 0
    assert memory["gigabytes"] >= 0 and results["prefill"] == []
    assert "read tokens" in done.stdout and "load of the machine" in done.stdout and plot.stat().st_size > 1000
