"""The table of docs/PLANNING.md is what scripts/studies/communication_steps.py predicts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_has_its_figures(run: Callable[..., Any], tmp_path: Path) -> None:
    run("studies/communication_steps.py", "--json", tmp_path / "steps.json")
    result = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))
    steps, decode = result["steps"], result["two_batches_in_decode"]
    text = (ROOT / "docs" / "PLANNING.md").read_text(encoding="utf-8")
    table = text.partition("| change | TTFT ms |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == [
        f"| {s['step']} | {s['even']['ttft_ms']:.0f} | {s['skewed']['ttft_ms']:.0f} | {s['even']['tpot_ms']:.1f} |"
        for s in steps
    ]
    assert all(s["skewed"]["ttft_ms"] >= s["even"]["ttft_ms"] for s in steps)
    assert f"{decode['tpot_ms']:.1f} to {decode['tpot_ms_two_batches']:.1f} ms with 512 requests" in " ".join(
        text.split()
    )


@pytest.mark.slow
def test_an_emulated_rank_beside_the_planner(run: Callable[..., Any], tmp_path: Path) -> None:
    """Steps that the page has too: equal bytes in decode; in prefill more by what even choices reach."""
    run("studies/communication_steps.py", "--emulate", 256, "--json", tmp_path / "steps.json")
    emulated = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))["emulated"]
    assert len(emulated) == 9
    for one in emulated:
        ratios = {key: one["emulated"][key] / one["planner"][key] for key in one["planner"]}
        print(one["step"], ratios)
        low, high = (0.999, 1.001) if one["step"].startswith("decode") else (0.95, 1.3)
        assert all(low < ratios[key] < high for key in ("bytes_between", "exchange_us")), one
        assert one["emulated"]["waited_us"] <= one["emulated"]["exchange_us"]
