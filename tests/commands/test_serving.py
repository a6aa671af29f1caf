"""The serving benchmark: arrivals, concurrency, what counts as good, and the fields of a report."""

from __future__ import annotations

import json
import math
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench.serving_benchmark import ServingLoad, ServingResult, check_serving, measure_serving
from dsa_engine.commands.bench.serving_tables import read_goals

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_serve.py"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=1024, page_size=16, cache_memory="40MB")


@pytest.mark.parametrize("burstiness, deviation", [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, deviation: float) -> None:
    times = ServingLoad(num_prompts=20_001, request_rate=5.0, burstiness=burstiness).arrivals()
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    # The deviation of a gamma distribution is its mean over the root of its shape.
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.05)


def test_a_load_is_the_same_for_the_same_seed() -> None:
    load = ServingLoad(num_prompts=50, request_rate=2.0, range_ratio=0.5, input_len=100, output_len=11)
    same, other = ServingLoad(**vars(load)), ServingLoad(**{**vars(load), "seed": 1})
    assert (load.arrivals(), load.lengths()) == (same.arrivals(), same.lengths())
    assert load.arrivals() != other.arrivals() and load.lengths() != other.lengths()
    assert all(50 <= n <= 150 and 5 <= m <= 17 for n, m in load.lengths())
    assert (
        ServingLoad(num_prompts=3).arrivals() == [0, 0, 0] and ServingLoad(num_prompts=2).lengths() == [(1024, 128)] * 2
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_prompts": 0}, "num_prompts must be at least 1, not 0"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
        ({"request_rate": 0.0}, "request_rate must be a number above 0"),
        ({"request_rate": math.nan}, "request_rate must be a number above 0"),
        ({"burstiness": -1.0}, "burstiness must be a number above 0"),
        ({"range_ratio": 1.0}, "below 1"),
    ],
)
def test_impossible_loads(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingLoad(**wrong)


def test_every_request_is_served_within_the_concurrency(llm: LLM) -> None:
    load = ServingLoad(
        num_prompts=7, input_len=60, output_len=5, range_ratio=0.4, max_concurrency=3, request_rate=200.0
    )
    result = measure_serving(llm.engine, load, warmup=0)
    assert result.max_at_once == 3
    assert [(r["input_len"], r["output_len"]) for r in result.requests] == load.lengths()
    assert not llm.engine.scheduler.has_work
    for r in result.requests:
        assert r["error"] is None and 0 < r["ttft"] <= r["e2el"] < result.duration
        assert r["tpot"] * (r["output_len"] - 1) == pytest.approx(r["e2el"] - r["ttft"])
        assert sum(r["itl"]) == pytest.approx(r["e2el"] - r["ttft"])


def test_fields_and_goodput() -> None:
    def request(ttft: float, tpot: float | None) -> dict[str, Any]:
        steps = 3 if tpot else 0
        e2el = ttft + steps * (tpot or 0)
        figures = {"ttft": ttft, "tpot": tpot, "itl": [tpot] * steps, "e2el": e2el}
        return {"input_len": 10, "output_len": 1 + steps, "error": None} | figures

    failed = {"input_len": 10, "output_len": 2, "error": "its logits are not finite"}
    requests = [request(0.1, 0.02), request(0.3, 0.04), request(0.1, None), failed]
    result = ServingResult(ServingLoad(num_prompts=4), 2.0, 2, requests, 4, good=2).to_json()
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 1.5 and result["request_goodput"] == 1.0
    assert result["output_throughput"] == 4.5 and result["output_throughput_per_device"] == 2.25
    assert result["total_token_throughput"] == 19.5
    assert result["median_ttft_ms"] == pytest.approx(100) and result["mean_tpot_ms"] == pytest.approx(30)
    assert result["max_e2el_ms"] == pytest.approx(420) and result["mean_itl_ms"] == pytest.approx(30)


def test_goals_decide_what_is_good(llm: LLM) -> None:
    load = ServingLoad(num_prompts=2, input_len=20, output_len=2)
    assert measure_serving(llm.engine, load, {"ttft": 1e9, "tpot": 1e9, "e2el": 1e9}, warmup=0).good == 2
    assert measure_serving(llm.engine, load, {"ttft": 1e9, "e2el": 1e-9}, warmup=0).good == 0
    assert read_goals(["ttft:2000", "tpot:50"]) == {"ttft": 2.0, "tpot": 0.05}
    for wrong in ("ttft", "itl:5", "tpot:-1", "tpot:nan", "tpot:inf"):
        with pytest.raises(ValueError, match=r"such as tpot:50, not"):
            read_goals([wrong])


def test_requests_that_cannot_fit_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1000 tokens and 100 new ones exceed max_model_len 1024"):
        check_serving(llm.engine, ServingLoad(input_len=1000, output_len=100))


def test_an_interrupt_leaves_no_page_and_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))
    step = llm.engine.step

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_serving(llm.engine, ServingLoad(num_prompts=3, input_len=20, output_len=8), warmup=0)
    assert not llm.engine.scheduler.has_work


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    sizes = ["--num-prompts", "3", "--random-input-len", "40", "--random-output-len", "4", "--num-warmups", "0"]
    options = [*sizes, "--goodput", "ttft:100000", "--json", str(path), "--device", "cpu", "--max-model-len", "512"]
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(path.read_text())
    assert result["completed"] == 3 and result["total_output_tokens"] == 12 and result["request_goodput"] > 0
    assert result["options"]["request_rate"] == "inf" and len(result["requests"]) == 3
    text = capsys.readouterr().out
    for line in ("requests/s (all at once)", "TTFT", "TPOT", "ITL", "E2EL", "goodput"):
        assert line in text
