"""``compare_transformers.py`` on the random demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_compare_transformers(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "compare.json"
    sizes = ["--input-len", 300, "--context", 280, "--batch-size", 2, "--output-len", 4, "--repeat", 1]
    done = run("studies/compare_transformers.py", *sizes, "--threads", 1, "--json", report)
    assert done.returncode == 0, done.stderr
    assert re.match(
        r"transformers takes up to about .* for 2 prompt\(s\) of 280 tokens; .* are available\n", done.stdout
    )
    prefill, decode = json.loads(report.read_text())["results"]
    assert prefill["relative_error"] < 1e-4 and decode["equal_tokens"] == decode["tokens"] == 8
    assert prefill["ratio"] > 0 and max(row["transformers_peak_bytes"] for row in (prefill, decode)) > 0


def test_what_takes_too_much_memory_is_not_begun(run: Run) -> None:
    done = run("studies/compare_transformers.py", "--input-len", 400_000)
    assert done.returncode == 2 and "prompt(s) of 400,000 tokens" in done.stderr
    assert "give a shorter --input-len or --context, or a smaller --batch-size" in done.stderr
