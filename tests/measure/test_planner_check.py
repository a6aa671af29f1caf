"""Predictions beside measured runs: exact where times follow the model, and every stage there where they are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsa_engine.llm import LLM
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.planner import check
from dsa_engine.measure.planner.check import Case, Check
from dsa_engine.model.profile_stages import STAGES

SMALL = (Case("prefill", 300), Case("prefill", 700), Case("decode", 300), Case("decode", 600, 2))
LARGE = (Case("prefill", 900), Case("decode", 1200, 4))


@pytest.fixture(scope="module")
def made(demo_cache: Path) -> Check:
    return Check(device="cpu")


def test_times_that_follow_the_model_are_predicted(made: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed time for each pass, and operations at a tenth of the peak."""
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: Ceilings(1e12, 1e15))

    def measured(llm: LLM, case: Case) -> dict[str, float]:
        work = check._work(llm, case)
        seconds = {
            name: 1e-3 * one.passes + max(10 * one.flops / 1e12, 10 * one.bytes_moved / 1e15)
            for name, one in work.items()
        }
        return seconds | {"communication": 0.0}

    monkeypatch.setattr(check, "_measured", measured)
    for one in made.run(SMALL, LARGE, turns=1):
        assert one.ratio == pytest.approx(1, rel=1e-6), one.table()
        for name, seconds in one.predicted.items():
            assert seconds == pytest.approx(one.measured[name], rel=1e-6), name


@pytest.mark.slow
def test_real_runs_have_all_stages(made: Check) -> None:
    found = made.run(SMALL, LARGE, turns=1)
    assert [one.case for one in found] == list(LARGE)
    for one in found:
        busy = {name for name, seconds in one.measured.items() if seconds} - {"communication"}
        assert busy <= {*STAGES, "other"} and set(one.predicted) >= busy - {"LM head"}
        assert all(one.predicted[name] > 0 for name in busy & set(one.predicted))
        table = one.to_json()
        assert table["predicted_over_measured"] == one.ratio > 0 and "ratio" in one.table()
    assert made.reports and "emulated rank 0 of 4" in made.title
