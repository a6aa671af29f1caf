"""The serving benchmark: prompts, arrivals, concurrency, prefix hits, what counts as good, and a report's fields."""

from __future__ import annotations

import json
import math
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, cli
from dsa_engine.commands.bench.serving.datasets import Dataset, GeneratedSharedPrefix, PrefixRepetition, RandomPrompts
from dsa_engine.commands.bench.serving.in_process import check_serving, measure_serving
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.result import NOT_SENT, ServingResult, compared
from dsa_engine.commands.bench.serving.tables import print_serving, read_goals

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_serve.py"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="cpu", max_model_len=1024, page_size=16, cache_memory="40MB")


@pytest.mark.parametrize("burstiness, deviation", [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, deviation: float) -> None:
    times = ServingLoad(RandomPrompts(10_001), request_rate=5.0, burstiness=burstiness).arrivals()
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    # The deviation of a gamma distribution is its mean over the root of its shape.
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("dataset", [RandomPrompts(20, 9), PrefixRepetition(20), GeneratedSharedPrefix(3, 4, 10, 2)])
def test_a_load_is_the_same_for_the_same_seed(dataset: Dataset) -> None:
    one, same = (ServingLoad(dataset, request_rate=2.0) for _ in range(2))
    other = ServingLoad(dataset, request_rate=2.0, seed=1)
    assert (one.arrivals(), one.conversations(99)) == (same.arrivals(), same.conversations(99))
    assert one.arrivals() != other.arrivals() and one.conversations(99) != other.conversations(99)


def test_lengths_of_random_prompts() -> None:
    load = ServingLoad(RandomPrompts(50, input_len=100, output_len=11, range_ratio=0.5))
    assert all(50 <= n <= 150 and 5 <= m <= 17 for ((n, m),) in load.lengths())
    assert load.lengths() != ServingLoad(load.dataset, seed=1).lengths()
    plain = ServingLoad(RandomPrompts(2))
    assert plain.arrivals() == [0, 0] and plain.lengths() == [[(1024, 128)]] * 2
    (one, _), half = plain.conversations(10), plain.conversations(10, per_token=0.5)[0]
    assert len(one.questions[0]) == 1024 and set(one.questions[0]) == set(range(10)) and len(half.questions[0]) == 512


def test_prefixes_are_repeated_in_any_order() -> None:
    load = ServingLoad(PrefixRepetition(11, prefix_len=30, suffix_len=6, num_prefixes=3, output_len=2))
    prompts = [one.questions[0] for one in load.conversations(1000)]
    prefixes = [tuple(prompt[:30]) for prompt in prompts]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 4, 4]
    assert [prefixes.index(prefix) % 3 for prefix in prefixes] != [number % 3 for number in range(11)]
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 11 and load.lengths() == [[(36, 2)]] * 11


def test_conversations_grow() -> None:
    load = ServingLoad(GeneratedSharedPrefix(2, 3, system_prompt_len=40, question_len=5, output_len=7, num_turns=3))
    assert load.lengths() == [[(45, 7), (57, 7), (69, 7)]] * 6 and load.longest() == (69, 7)
    conversations = load.conversations(1000)
    assert len({tuple(one.questions[0][:40]) for one in conversations}) == 2
    assert all([len(question) for question in one.questions] == [45, 5, 5] for one in conversations)
    assert len(load.arrivals()) == 6


@pytest.mark.parametrize(
    "kind, wrong, message",
    [
        (RandomPrompts, {"num_prompts": 0}, "--num-prompts must be at least 1, not 0"),
        (RandomPrompts, {"range_ratio": 1.0}, "--random-range-ratio must be at least 0 and below 1"),
        (PrefixRepetition, {"num_prompts": 9}, "--num-prompts 9 is less than --prefix-repetition-num-prefixes 10"),
        (GeneratedSharedPrefix, {"num_turns": 0}, "--gsp-num-turns must be at least 1"),
        (ServingLoad, {"max_concurrency": 0}, "--max-concurrency must be at least 1"),
        (ServingLoad, {"request_rate": 0.0}, "--request-rate must be a number above 0"),
        (ServingLoad, {"request_rate": math.nan}, "--request-rate must be a number above 0"),
        (ServingLoad, {"burstiness": -1.0}, "--burstiness must be a number above 0"),
    ],
)
def test_impossible_loads(kind: type[Any], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


def test_every_request_is_served_within_the_concurrency(llm: LLM) -> None:
    load = ServingLoad(RandomPrompts(7, 60, 5, range_ratio=0.4), max_concurrency=3, request_rate=200.0)
    result = measure_serving(llm.engine, load, warmup=0)
    assert result.max_at_once == 3
    assert [[(r["input_len"], r["output_len"])] for r in result.requests] == load.lengths()
    assert not llm.engine.scheduler.has_work
    for r in result.requests:
        assert r["error"] is None and 0 < r["ttft"] <= r["e2el"] < result.duration
        assert r["tpot"] * (r["output_len"] - 1) == pytest.approx(r["e2el"] - r["ttft"])
        assert sum(r["itl"]) == pytest.approx(r["e2el"] - r["ttft"])


def request(ttft: float, tpot: float | None, cached: int | None = 0) -> dict[str, Any]:
    steps = 3 if tpot else 0
    counts = {"input_len": 10, "output_len": 1 + steps, "num_cached_tokens": cached, "error": None}
    return counts | {"ttft": ttft, "tpot": tpot, "itl": [tpot] * steps, "e2el": ttft + steps * (tpot or 0)}


def result_of(requests: list[dict[str, Any]], goals: dict[str, float] | None = None) -> ServingResult:
    load = ServingLoad(RandomPrompts(len(requests), 10))
    numbered = [{"conversation": number, "turn": 0} | one for number, one in enumerate(requests)]
    return ServingResult.of(load, 2.0, 2, numbered, len(requests), goals or {})


FAILED = {"input_len": 10, "output_len": 2, "num_cached_tokens": 0, "error": "its logits are not finite"}


def test_fields_and_goodput() -> None:
    requests = [request(0.1, 0.02), request(0.3, 0.04), request(0.1, None), FAILED]
    result = result_of(requests, {"ttft": 0.2}).to_json()
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 1.5 and result["request_goodput"] == 1.0
    assert result["output_throughput"] == 4.5 and result["output_throughput_per_device"] == 2.25
    assert result["total_token_throughput"] == 19.5
    assert result["median_ttft_ms"] == pytest.approx(100) and result["mean_tpot_ms"] == pytest.approx(30)
    assert result["max_e2el_ms"] == pytest.approx(420) and result["mean_itl_ms"] == pytest.approx(30)
    assert result["prefix_cache_hit_rate"] == 0.0 and "mean_ttft_hit_ms" not in result


def test_hits_and_misses_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of([request(0.4, 0.02), request(0.1, 0.02, 8), request(0.2, 0.02, 4), FAILED])
    without = result_of([request(0.5, 0.02), request(0.6, 0.02), request(0.8, 0.02), request(0.9, 0.02)])
    json = compared(result, without)
    assert json["prefix_cache_hit_rate"] == pytest.approx(0.4) and json["total_cached_tokens"] == 12
    assert json["mean_ttft_hit_ms"] == pytest.approx(150) and json["mean_ttft_miss_ms"] == pytest.approx(400)
    # Those of the same two requests, and their quotients.
    assert json["without_hits"]["mean_ttft_hit_ms"] == pytest.approx(700)
    assert json["ttft_hit_ratios"] == pytest.approx([6, 4]) and json["median_ttft_hit_ratio"] == pytest.approx(5)
    print_serving(result, without)
    text = capsys.readouterr().out
    for line in (
        "prefix cache hit rate 40.0% 0.0%",
        "TTFT of 2 hits 150.0 150.0 190.0 199.0",
        "TTFT of these, without hits 700.0 700.0 780.0 798.0",
        "TTFT of 1 misses 400.0 400.0 400.0 400.0",
        "TTFT, without hits 700.0 700.0 870.0 897.0",
        "failed: 1 × its logits are not finite",
        "TTFT without the hit / with it, median over these requests: 5",
    ):
        assert line in " ".join(text.split()), line
    print_serving(result_of([request(0.4, 0.02, None)]))
    assert "prefix cache hit rate not reported" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("hits", [True, False])
def test_conversations_hit_their_own_past(llm: LLM, hits: bool) -> None:
    shape = GeneratedSharedPrefix(1, 3, system_prompt_len=64, question_len=29, output_len=4, num_turns=2)
    load = ServingLoad(shape, max_concurrency=1)
    result = measure_serving(llm.engine, load, warmup=1, hits=hits)
    assert result.max_at_once == 1 and [(r["conversation"], r["turn"]) for r in result.requests] == [
        (conversation, turn) for conversation in range(3) for turn in range(2)
    ]
    assert [r["input_len"] for r in result.requests] == [93, 126] * 3
    # Pages of 16: a system prompt has 4; a second turn finds what the first has computed, 96 tokens.
    expected = [0, 96, 64, 96, 64, 96] if hits else [0] * 6
    assert [r["num_cached_tokens"] for r in result.requests] == expected
    assert not llm.engine.scheduler.has_work


def test_the_turns_after_a_failed_one_are_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be sent, as their prompts contain its answer."""
    load = ServingLoad(GeneratedSharedPrefix(1, 2, 20, 5, 3, num_turns=3), max_concurrency=1)
    steps, step = iter(range(100)), llm.engine.step

    def failing() -> Any:
        if next(steps) == 1:
            llm.engine.finish(llm.engine.scheduler.running[0], "error", "it broke")
        return step()

    monkeypatch.setattr(llm.engine, "step", failing)
    result = measure_serving(llm.engine, load, warmup=0)
    assert [r["error"] for r in result.requests] == ["it broke", NOT_SENT, NOT_SENT, None, None, None]
    assert result.to_json()["failed"] == 3


def test_goals_decide_what_is_good(llm: LLM) -> None:
    load = ServingLoad(RandomPrompts(2, 20, 2))
    assert measure_serving(llm.engine, load, {"ttft": 1e9, "tpot": 1e9, "e2el": 1e9}, warmup=0).good == 2
    assert measure_serving(llm.engine, load, {"ttft": 1e9, "e2el": 1e-9}, warmup=0).good == 0
    assert read_goals(["ttft:2000", "tpot:50"]) == {"ttft": 2.0, "tpot": 0.05}
    for wrong in ("ttft", "itl:5", "tpot:-1", "tpot:nan", "tpot:inf"):
        with pytest.raises(ValueError, match=r"such as tpot:50, not"):
            read_goals([wrong])


def test_requests_that_cannot_fit_are_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="1000 tokens and 100 new ones exceed max_model_len 1024"):
        check_serving(llm.engine, ServingLoad(RandomPrompts(1, 1000, 100)))


def test_an_interrupt_leaves_no_page_and_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))
    step = llm.engine.step

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_serving(llm.engine, ServingLoad(RandomPrompts(3, 20, 8)), warmup=0)
    assert not llm.engine.scheduler.has_work


def run_script(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> dict[str, Any]:
    """The JSON of a run of the script."""
    engine = ["--device", "cpu", "--max-model-len", "512", "--page-size", "16"]
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *options, "--json", str(path), "--num-warmups", "0", *engine])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(path.read_text())


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-prompts", "3", "--random-input-len", "40", "--random-output-len", "4"]
    result = run_script(monkeypatch, tmp_path / "serve.json", *sizes, "--goodput", "ttft:100000")
    assert result["completed"] == 3 and result["total_output_tokens"] == 12 and result["request_goodput"] > 0
    assert (
        result["options"]["request_rate"] == "inf"
        and result["options"]["num_prompts"] == 3
        and len(result["requests"]) == 3
    )
    assert "without_hits" not in result
    text = capsys.readouterr().out
    for line in ("requests/s (all at once)", "TTFT", "TPOT", "ITL", "E2EL", "goodput"):
        assert line in text


def test_the_script_compares_with_and_without_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"prefix-len": 64, "suffix-len": 5, "num-prefixes": 2, "output-len": 2}
    options = [word for name, value in sizes.items() for word in (f"--prefix-repetition-{name}", str(value))]
    options += ["--dataset-name", "prefix_repetition", "--num-prompts", "4"]
    result = run_script(monkeypatch, tmp_path / "serve.json", *options)
    assert result["total_cached_tokens"] == 2 * 64 and result["without_hits"]["total_cached_tokens"] == 0
    assert len(result["ttft_hit_ratios"]) == 2 and "without hits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--backend openai", "--backend says how to ask a server: give its address with --base-url"),
        ("--prefix-hits both --no-enable-prefix-caching", "--prefix-hits both needs the prefix cache"),
        (
            "--dataset-name generated-shared-prefix --num-prompts 5",
            "--num-prompts is not an option of",
        ),
        ("--base-url http://127.0.0.1:9 --max-model-len 3", "--max-model-len is an option of the engine in this"),
        ("--base-url 127.0.0.1:9", "--base-url must be such as http://127.0.0.1:8000, not '127.0.0.1:9'"),
        ("--base-url http://127.0.0.1:9", "http://127.0.0.1:9/v1/models names no model"),
        ("--base-url http://127.0.0.1:9 --model a", "refused a first request for the model 'a': ConnectError"),
    ],
)
def test_impossible_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "serve", *options.split()])
    assert message in capsys.readouterr().err
