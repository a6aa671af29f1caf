"""Reports of drafts, and assumed acceptance for runs whose tokens mean nothing."""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import SpeculationMetrics
from dsa_engine.commands.bench.generation_benchmark import measure_latency
from dsa_engine.engine.sampling.chain import seed_key
from dsa_engine.measure.assumed_acceptance import AssumedAcceptance


def test_counts_of_drafts() -> None:
    metrics = SpeculationMetrics.of([(3, 3), (3, 0), (3, 1), (1, 1), (0, 0)])
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 10, 5)
    assert metrics.num_draft_tokens_per_pos == (4, 3, 3) and metrics.num_accepted_tokens_per_pos == (3, 1, 1)
    assert metrics.acceptance_rates == [3 / 4, 1 / 3, 1 / 3] and metrics.mean_acceptance_length == 1 + 5 / 4
    assert math.isnan(SpeculationMetrics.of([(0, 0)]).mean_acceptance_length)


def test_assumed_rates_are_kept() -> None:
    rule, count = AssumedAcceptance((0.9, 0.5, 0.2)), 4000
    keys = torch.tensor([seed_key(i % 40) for i in range(count)])
    positions = torch.arange(count) // 40

    def accepted_of(num_drafts: int) -> torch.Tensor:
        drafts = torch.zeros(count, num_drafts, dtype=torch.int64)
        return rule(torch.ones(count, 1 + num_drafts, dtype=torch.int64), drafts, keys, positions)

    accepted = accepted_of(4)
    rates = [float((accepted > i).float().mean()) for i in range(4)]
    assert rates == pytest.approx([0.9, 0.5, 0.2, 0.2], abs=0.03)
    assert torch.equal(accepted, accepted_of(4)), "the same on every rank"
    assert torch.equal(accepted_of(0), torch.zeros_like(keys))
    assert torch.equal(accepted_of(1), accepted.clamp(max=1))
    assert AssumedAcceptance.default(3).rates == pytest.approx((0.85, 0.7225, 0.614125))


@pytest.mark.parametrize("rates", [(), (1.1,), (0.5, 0.6), (-0.1,)])
def test_rates_that_are_none(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        AssumedAcceptance(rates)


def test_one_run_with_and_without_drafts(tiny_llm: Callable[..., Any]) -> None:
    llm = tiny_llm(400, speculative_config={"num_speculative_tokens": 3})
    steps = []
    for count, rates in ((0, None), (3, (1.0,)), (2, (1.0, 0.0)), (0, None)):
        acceptance = AssumedAcceptance(rates) if rates else None
        result = measure_latency(
            llm, 40, 25, warmup=0, repeat=1, fill_cache=True, num_drafts=count, acceptance=acceptance
        )
        row = result.to_json()
        assert result.num_speculative_tokens == count and ("assumed_acceptance" in row) == (count > 0)
        assert ("mean_acceptance_length" in row) == (count > 0)
        steps.append(row.get("mean_acceptance_length", 1.0))
        assert row["median_tpot_ms"] > 0
    assert steps[0] == steps[3] == 1.0 and 3.5 < steps[1] <= 4 and steps[2] == 2.0
    with pytest.raises(ValueError, match="4 drafts a step are not possible: num_speculative_tokens allows 0 to 3"):
        llm.engine.set_num_drafts(4)


def test_measure_tpot_with_several_numbers_of_drafts(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "tpot.json"
    options = ["--model", "demo-random", "--input-len", "300", "--output-len", "9", "--repeat", "1", "--warmup", "0"]
    options += ["--fill-cache", "random", "--cache-memory", "16MiB", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["measure_tpot.py", *options, "--num-speculative-tokens", "0,1,3"])
    runpy.run_path("scripts/measure_tpot.py", run_name="__main__")
    plain, *drafted = json.loads(report.read_text())["results"]
    assert "num_speculative_tokens" not in plain
    assert [r["num_speculative_tokens"] for r in drafted] == [1, 3]
    assert [len(r["assumed_acceptance"]) for r in drafted] == [1, 3]
    shown = capsys.readouterr().out
    assert "tokens a step" in shown and "assumed" in shown and "300 × 1, k = 3" in shown
    monkeypatch.setattr(sys, "argv", ["measure_tpot.py", *options, "--acceptance", "0.5,0.9"])
    with pytest.raises(SystemExit):
        runpy.run_path("scripts/measure_tpot.py", run_name="__main__")
    assert "acceptance rates must lie in [0, 1] and not rise" in capsys.readouterr().err
