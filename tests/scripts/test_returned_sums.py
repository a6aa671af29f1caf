"""scripts/compare_returned_sums.py on one short text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_rounding_of_returned_sums(run_script: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "sums.json"
    done = run_script("compare_returned_sums.py", "--texts", 1, "--length", 48, "--json", report)
    assert done.returncode == 0 and "same greedy token" in done.stdout, done.stderr
    sums = json.loads(report.read_text())["sums"]
    assert 0 == sums["float32"]["error"] < sums["bfloat16"]["error"] < sums["FP8"]["error"] < 0.2
    done = run_script("compare_returned_sums.py", "--texts", 0)
    assert done.returncode == 2 and "--texts must be at least 1" in done.stderr
