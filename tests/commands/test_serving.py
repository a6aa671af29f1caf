"""The serving benchmark against a tiny OpenAI server: what it sends, counts and times, and what it says of failures."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import cli
from dsa_engine.commands.bench.serving.command import add_arguments
from dsa_engine.commands.bench.serving.load import WORDS, Turn, arrivals, conversations, shapes
from dsa_engine.commands.bench.serving.result import NOT_SENT, print_serving, read_goals, summary
from dsa_engine.commands.bench.serving.traffic import Traffic, send_load
from servers.openai_server import OpenAIServer, openai_server

# 127 words are sent to calibrate; only longer prompts meet a server's fault.
LONG = "--num-prompts 3 --random-input-len 500 --random-output-len 4"


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def options(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words.split())


def measure(server: OpenAIServer, words: str) -> Traffic:
    traffic, _ = asyncio.run(send_load(options(f"--base-url {server.url} --num-warmups 0 --no-progress {words}")))
    return traffic


@pytest.mark.parametrize("burstiness, deviation", [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, deviation: float) -> None:
    times = arrivals(options(f"--request-rate 5 --burstiness {burstiness}"), 10_001)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and min(gaps) >= 0 and arrivals(options(""), 2) == [0, 0]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    # The deviation of a gamma distribution is its mean over the root of its shape.
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(deviation, rel=0.05)


GSP = "--dataset-name generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 3"
REPETITION = "--dataset-name prefix_repetition --num-prompts 11 --prefix-repetition-num-prefixes 3"


@pytest.mark.parametrize("dataset", ["--num-prompts 20", REPETITION, GSP])
def test_a_load_is_the_same_for_the_same_seed(dataset: str) -> None:
    one, same, other = (
        (arrivals(args, 9), conversations(args, 1.0))
        for args in (options(f"{dataset} --request-rate 2 --seed {seed}") for seed in (0, 0, 1))
    )
    assert one == same and one[0] != other[0] and one[1] != other[1]


def test_lengths() -> None:
    around = options("--num-prompts 50 --random-input-len 100 --random-output-len 11 --random-range-ratio 0.5")
    assert all(50 <= turn.added <= 150 and 5 <= turn.output <= 17 for (turn,), *_ in shapes(around))
    (one, two) = conversations(options("--num-prompts 2"), 0.5)
    assert len(one.questions[0].split()) == 512 and one.output_lens == [128] and one != two
    assert set(one.questions[0].split()) <= set(WORDS)
    lengths = "--prefix-repetition-prefix-len 30 --prefix-repetition-suffix-len 6"
    prompts = [one.questions[0].split() for one in conversations(options(f"{REPETITION} {lengths}"), 1.0)]
    prefixes = [tuple(prompt[:30]) for prompt in prompts]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 4, 4]
    assert [prefixes.index(prefix) % 3 for prefix in prefixes] != [number % 3 for number in range(11)]
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 11 and all(len(prompt) == 36 for prompt in prompts)
    lengths = "--gsp-system-prompt-len 40 --gsp-question-len 5 --gsp-output-len 7 --gsp-num-turns 3"
    grown = conversations(options(f"{GSP} {lengths}"), 1.0)
    assert [shape.turns for shape in shapes(options(f"{GSP} {lengths}"))] == [[Turn(5, 7)] * 3] * 6
    assert len({tuple(one.questions[0].split()[:40]) for one in grown}) == 2
    assert all([len(question.split()) for question in one.questions] == [45, 5, 5] for one in grown)


def request(ttft: float, tpot: float | None, cached: int | None = 0) -> dict[str, Any]:
    steps = 3 if tpot else 0
    counts = {"input_len": 10, "output_len": 1 + steps, "num_cached_tokens": cached, "error": None}
    return counts | {"ttft": ttft, "tpot": tpot, "itl": [tpot] * steps, "e2el": ttft + steps * (tpot or 0)}


FAILED = {"input_len": 10, "output_len": 2, "num_cached_tokens": 0, "error": "its logits are not finite"}


def test_fields_and_goodput() -> None:
    requests = [request(0.1, 0.02), request(0.3, 0.04), request(0.1, None), FAILED]
    result = summary(requests, 2.0, 4, {"ttft": 0.2})
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 1.5 and result["request_goodput"] == 1.0
    assert result["output_throughput"] == 4.5 and result["total_token_throughput"] == 19.5
    assert result["median_ttft_ms"] == pytest.approx(100) and result["mean_tpot_ms"] == pytest.approx(30)
    assert result["max_e2el_ms"] == pytest.approx(420) and result["mean_itl_ms"] == pytest.approx(30)
    assert result["prefix_cache_hit_rate"] == 0.0 and "mean_ttft_hit_ms" not in result
    assert read_goals(["ttft:2000", "tpot:50"]) == {"ttft": 2.0, "tpot": 0.05}
    for wrong in ("ttft", "itl:5", "tpot:-1", "tpot:nan", "tpot:inf"):
        with pytest.raises(ValueError, match=wrong):
            read_goals([wrong])


def test_hits_and_misses_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    result = summary([request(0.4, 0.02), request(0.1, 0.02, 8), request(0.2, 0.02, 4), FAILED], 2.0, 3, {})
    assert result["prefix_cache_hit_rate"] == pytest.approx(0.4) and result["total_cached_tokens"] == 12
    print_serving(result, 4.0)
    text = " ".join(capsys.readouterr().out.split())
    for line in (
        "prefix cache hit rate 40.0%",
        "TTFT of hits 150.0 150.0 190.0 199.0",
        "TTFT of misses 400.0 400.0 400.0 400.0",
        "failed: 1 × its logits are not finite",
    ):
        assert line in text, line
    print_serving(summary([request(0.4, 0.02, None)], 1.0, 1, {}), 4.0)
    assert "prefix cache hit rate not reported" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_requests_and_their_figures(server: OpenAIServer, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    traffic = measure(server, f"{LONG} --backend {backend} --request-rate 500 --max-concurrency 2")
    chat = backend == "openai-chat"
    sent = server.bodies[2:]  # after those that calibrate
    assert len(sent) == 3 and 1 <= server.at_once <= 2 and 1 <= traffic.max_at_once <= 2
    for body in sent:
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        assert len(prompt.split()) == 250  # a word has two tokens
        assert body["path"] == ("/v1/chat/completions" if chat else "/v1/completions")
        assert body["authorization"] == "Bearer a key" and body["model"] == "tiny" and body["temperature"] == 0.0
        assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"]
        assert body["max_completion_tokens" if chat else "max_tokens"] == 4 and "cache_salt" not in body
    for r in traffic.requests:
        assert (r["input_len"], r["output_len"], r["error"]) == (500 + 3 * chat, 4, None)
        assert 0 < r["ttft"] <= r["e2el"] < traffic.duration and len(r["itl"]) == 3
        assert r["tpot"] * 3 == pytest.approx(r["e2el"] - r["ttft"])


def test_hits_are_those_that_the_server_reports(server: OpenAIServer) -> None:
    sizes = "--prefix-repetition-prefix-len 48 --prefix-repetition-suffix-len 8 --prefix-repetition-output-len 1"
    load = f"{REPETITION} {sizes} --num-prompts 4 --prefix-repetition-num-prefixes 2 --max-concurrency 1"
    without = measure(server, f"{load} --prefix-hits off")
    assert [r["num_cached_tokens"] for r in without.requests] == [0] * 4
    assert len({body["cache_salt"] for body in server.bodies[2:]}) == 4
    assert sorted(r["num_cached_tokens"] for r in measure(server, load).requests) == [0, 0, 48, 48]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_conversations_contain_the_answers(server: OpenAIServer, backend: str) -> None:
    load = "--dataset-name generated-shared-prefix --gsp-num-groups 1 --gsp-prompts-per-group 1 --gsp-num-turns 3"
    sizes = "--gsp-system-prompt-len 40 --gsp-question-len 8 --gsp-output-len 3"
    traffic = measure(server, f"{load} {sizes} --backend {backend}")
    *_, last = server.bodies
    if backend == "openai-chat":
        assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert last["messages"][1]["content"].split() == ["word"] * 3
    else:
        assert last["prompt"].split()[24:27] == last["prompt"].split()[31:34] == ["word"] * 3
        assert "  " not in last["prompt"]  # the text as it came: the first page of the next turn is a hit
    assert [r["num_cached_tokens"] > 0 for r in traffic.requests] == [False, True, True]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refused", "HTTP 429: too many requests"),
        ("cut", "the stream ended before the answer did"),
        ("event", "error in the stream: a rank has died"),
        ("garbage", "the stream is not that of the OpenAI API: JSONDecodeError"),
        ("no usage", "the server sent no usage"),
    ],
)
def test_failures_are_counted_and_shown(
    server: OpenAIServer,
    fault: str,
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.fault, path = fault, tmp_path / "a.json"
    words = f"--base-url {server.url}/v1 {LONG} --num-warmups 0 --json {path}"
    cli.main(["bench", "serve", *words.split()])
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"]) == (0, 3) and all(error in r["error"] for r in report["requests"])
    assert f"failed: 3 × {error}" in capsys.readouterr().out
    url = f"{server.url}/v1/completions"
    assert report["server"] == {"url": url, "backend": "openai", "model": "tiny", "tokens_a_word": 2.0}
    assert report["options"]["num_warmups"] == 0 and report["options"]["request_rate"] == "inf"


def test_a_server_without_details_has_no_hit_rate(server: OpenAIServer) -> None:
    server.fault = "no details"
    traffic = measure(server, f"{LONG} --no-ignore-eos")
    assert [(r["num_cached_tokens"], r["error"]) for r in traffic.requests] == [(None, None)] * 3
    assert "ignore_eos" not in server.bodies[-1]


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_last_token_without_text_counts(server: OpenAIServer, tokens: int) -> None:
    server.fault = "silent end"
    words = f"--num-prompts 1 --random-input-len 500 --random-output-len {tokens} --backend openai-chat"
    (one,) = measure(server, words).requests
    assert (one["output_len"], one["error"]) == (tokens, None) and 0 < one["ttft"] <= one["e2el"]


def test_a_conversation_ends_with_its_failure(server: OpenAIServer) -> None:
    server.fault = "refused"
    load = "--dataset-name generated-shared-prefix --gsp-num-groups 1 --gsp-prompts-per-group 2 --gsp-num-turns 3"
    traffic = measure(server, f"{load} --gsp-system-prompt-len 370 --gsp-question-len 20 --gsp-output-len 5")
    assert [r["error"] for r in traffic.requests] == [None, "HTTP 429: too many requests", NOT_SENT] * 2


def test_a_server_is_measured_without_torch() -> None:
    code = "import sys; from dsa_engine import cli; cli.COMMANDS['bench serve'].load()\n"
    code += "import dsa_engine.commands.bench.serving.traffic; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
