"""``measure_host.py``: its tables and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_measure_host(run_script: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "host.json"
    sizes = ("--worlds", 2, "--requests", 3, "--steps", 4, "--prefill", 256)
    done = run_script("measure_host.py", *sizes, "--json", report)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())
    (decode,) = results["decode"]
    assert decode["calls"] > 100 and 0 < decode["step_ms"] <= decode["max_ms"] and decode["turn_ms"] > 0
    assert results["prefill"][0]["with_evictions_ms"] > 0
    assert "decode step" in done.stdout and "load of the machine" in done.stdout
