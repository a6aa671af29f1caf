"""Predictions beside measured runs: exact if times follow the model; with real times, every stage is there."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.commands.planner import check
from dsa_engine.commands.planner.check import Check, CheckCase, Checked
from dsa_engine.commands.planner.handover import CheckedHandovers
from dsa_engine.llm import LLM
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.model.profile_stages import STAGES

SMALL = (CheckCase("prefill", 300), CheckCase("prefill", 700), CheckCase("decode", 300), CheckCase("decode", 600, 2))
LARGE = (CheckCase("prefill", 900), CheckCase("decode", 1200, 4))


@pytest.fixture(scope="module")
def made(demo_cache: Path) -> Check:
    return Check(device="cpu")


def test_times_that_follow_the_model_are_predicted(made: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed time for each pass, and operations at a tenth of the peak."""
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: Ceilings(1e12, 1e15))

    def measured(llm: LLM, case: CheckCase) -> dict[str, float]:
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


def test_repeats_that_differ_leave_it_open(made: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow periods that affect one run and not another; those that affect all runs of a turn change nothing."""
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: Ceilings(1e12, 1e15))
    calls = count()

    def measured(llm: LLM, case: CheckCase, spells: tuple[CheckCase, ...]) -> dict[str, float]:
        turn = next(calls) // (2 * len(SMALL) + len(LARGE))
        slow = 3.0 if case in spells and turn % 2 else 1.0
        return {name: slow * 1e-3 * one.passes for name, one in check._work(llm, case).items()}

    monkeypatch.setattr(check, "_measured", partial(measured, spells=LARGE[1:]))
    prefill, decode = made.run(SMALL, LARGE, turns=4)
    assert prefill.verdict == "within 25%; the ratio lies between 1.00 and 1.00"
    low, high = decode.interval
    assert low == pytest.approx(1 / 3) and high == pytest.approx(1)
    assert decode.verdict.startswith("cannot be judged: by its repeats the ratio lies between 0.33 and 1.00")
    assert decode.to_json()["interval_90_percent"] == [low, high] and decode.verdict in decode.table()
    calls = count()
    monkeypatch.setattr(check, "_measured", partial(measured, spells=(*SMALL, *LARGE)))
    assert all(one.interval == pytest.approx((1, 1)) for one in made.run(SMALL, LARGE, turns=4))
    missed = Checked(LARGE[0], {"LM head": 2.0}, {"LM head": 1.0}, draws=(1.9, 2.0, 2.1))
    assert missed.verdict.startswith("MISSES 25%; the ratio lies between 1.91 and 2.09")


@pytest.mark.slow
def test_real_runs_have_all_stages(made: Check) -> None:
    runs = made.run(SMALL, LARGE, turns=1)
    assert [one.case for one in runs] == list(LARGE)
    for one in runs:
        busy = {name for name, seconds in one.measured.items() if seconds} - {"communication"}
        assert busy <= {*STAGES, "other"} and set(one.predicted) >= busy - {"LM head"}
        assert all(one.predicted[name] > 0 for name in busy & set(one.predicted))
        table = one.to_json()
        assert table["predicted_over_measured"] == one.ratio > 0 and "ratio" in one.table()
    assert made.is_leader and "emulated rank 0 of 4" in made.title


def handovers(path: Path, **sent: Any) -> CheckedHandovers:
    """The check of a file of ``scripts/bench_disaggregated.py``: 3 prompts of 70 tokens and 2 of 600, on a link of 1 MB
    a second, with steps of 256 tokens of 2 ranks."""
    options = {"max_num_batched_tokens": 128, "page_size": 64, "kv_cache_dtype": "auto", "parallel": {"cp_size": None}}
    prompts = {"decoding": {"input_len": 70, "requests": 3}, "long": {"input_len": 600, "requests": 2}}
    transfer = {"prompts": prompts, "prefill_ranks": 2, "link_bytes_per_s": 1e6, "exposed_ms": 40.0} | sent
    run = {
        "dtype": "float32",
        "options_in_force": options | {"model": "demo-random", "hf_overrides": {}, "speculative_config": {}},
        "results": {"apart": {name: {"median_ttft_ms": 3e6} for name in prompts}},
        "transfer": transfer,
    }
    path.write_text(json.dumps(run))
    return CheckedHandovers.read(str(path))


def test_handovers_beside_those_of_a_run(made: Check, tmp_path: Path) -> None:
    engine, pages = made._small[0].engine, 3 * 2 + 2 * 10
    page_bytes, layers = engine.cache.page_bytes, engine.config.num_hidden_layers
    one = handovers(tmp_path / "a.json", bytes_sent=pages * page_bytes)
    assert (one.predicted.pages, one.predicted.nbytes, one.after) == (pages, one.nbytes, 0.02)
    assert "the bytes are equal" in one.table() and one.to_json()["measured"]["nbytes"] == one.nbytes
    # Prompts of one step leave after it; of the others, the last layer of the second and of the third step.
    assert one.predicted_after == pytest.approx((3 * 2 + 2 * 10 / layers) * page_bytes / 1e6)
    assert one.predicted.exposed == pytest.approx((3 * 2 + 2 * 10 * 88 / 600 / layers) * page_bytes / 1e6)
    again = handovers(tmp_path / "a.json", bytes_sent=(pages + 1) * page_bytes)
    assert f"the bytes DIFFER by {page_bytes:,}: " in again.verdict
    (tmp_path / "b.json").write_text('{"transfer": null}')
    with pytest.raises(ValueError, match="b.json is no JSON of scripts/bench_disaggregated.py with --prefill-ranks"):
        CheckedHandovers.read(str(tmp_path / "b.json"))
