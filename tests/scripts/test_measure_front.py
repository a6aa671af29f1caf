"""``measure_front.py``: its table and its report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_measure_front(run: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "front.json"
    small = ["--clients", 8, "--tokens", 8, "--seconds", 1, "--api-server-count", 2]
    done = run("measure_front.py", *small, "--json", report)
    assert "tokens/s of processor time" in done.stdout
    results = json.loads(report.read_text())["results"]
    assert [one["load"] for one in results] == ["events", "whole", "whole, stop strings"]
    for one in results:
        assert one["processes"] == len(one["requests_of_each"]) == 2 and sum(one["requests_of_each"]) > 0
        assert one["tokens_per_second"] > 0
