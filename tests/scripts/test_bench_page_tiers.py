"""``bench_page_tiers.py``: its table and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_bench_page_tiers(run: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "tiers.json"
    done = run("bench_page_tiers.py", "--pages", 3, "--page-size", 2, "--repeat", 1, "--json", report)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    assert [result["ratio_to_plain_copy"] for result in results if result["copy"] == "plain copy"] == [1.0, 1.0]
    assert len(results) == 8 and all(result["pages_per_s"] > 0 for result in results)
    assert "from the host" in done.stdout and "load of the machine" in done.stdout
