"""The table of docs/PLANNING.md is what scripts/studies/communication_steps.py predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_its_figures(run: Callable[..., Any], tmp_path: Path) -> None:
    run("studies/communication_steps.py", "--json", tmp_path / "steps.json")
    steps = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))["steps"]
    text = (ROOT / "docs" / "PLANNING.md").read_text(encoding="utf-8")
    table = text.partition("| change | TTFT ms |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == [
        f"| {s['step']} | {s['even']['ttft_ms']:.0f} | {s['skewed']['ttft_ms']:.0f} | {s['even']['tpot_ms']:.1f} |"
        for s in steps
    ]
    assert all(s["skewed"]["ttft_ms"] >= s["even"]["ttft_ms"] for s in steps)
