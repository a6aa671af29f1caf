"""The serving benchmark against a tiny OpenAI server: what it sends, counts and times, and what it says of failures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import cli
from dsa_engine.commands.bench.serving.datasets import GeneratedSharedPrefix, PrefixRepetition, RandomPrompts
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.over_http import measure_server
from dsa_engine.commands.bench.serving.result import NOT_SENT, ServingResult
from dsa_engine.commands.bench.serving.words import WORDS
from servers.openai_server import OpenAIServer, openai_server

# 127 words are sent to calibrate; only longer prompts meet a server's fault.
LONG = RandomPrompts(3, input_len=500, output_len=4)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with openai_server() as server:
        yield server


def measure(server: OpenAIServer, load: ServingLoad, backend: str = "openai", **options: Any) -> ServingResult:
    (result,), _ = measure_server(server.url, backend, None, "tiny", load, warmup=0, progress=False, **options)
    return result


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_requests_and_their_figures(server: OpenAIServer, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    load = ServingLoad(LONG, request_rate=500.0, max_concurrency=2)
    result = measure(server, load, backend)
    chat = backend == "openai-chat"
    sent = server.bodies[2:]  # after those that calibrate
    assert len(sent) == 3 and 1 <= server.at_once <= 2 and 1 <= result.max_at_once <= 2
    for body in sent:
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        assert len(prompt.split()) == 250 and set(prompt.split()) <= set(WORDS)  # a word has two tokens
        assert body["path"] == ("/v1/chat/completions" if chat else "/v1/completions")
        assert body["authorization"] == "Bearer a key" and body["model"] == "tiny" and body["temperature"] == 0.0
        assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"]
        assert body["max_completion_tokens" if chat else "max_tokens"] == 4 and "cache_salt" not in body
    for r in result.requests:
        assert (r["input_len"], r["output_len"], r["error"]) == (500 + 3 * chat, 4, None)
        assert 0 < r["ttft"] <= r["e2el"] < result.duration and len(r["itl"]) == 3
        assert r["tpot"] * 3 == pytest.approx(r["e2el"] - r["ttft"])
    assert result.to_json()["output_throughput_per_device"] is None


def test_hits_are_those_that_the_server_reports(server: OpenAIServer) -> None:
    load = ServingLoad(
        PrefixRepetition(4, prefix_len=48, suffix_len=8, num_prefixes=2, output_len=1), max_concurrency=1
    )
    results, _ = measure_server(server.url, "openai", None, None, load, passes=(False, True), progress=False)
    without, result = results
    assert [r["num_cached_tokens"] for r in without.requests] == [0] * 4
    assert sorted(r["num_cached_tokens"] for r in result.requests) == [0, 0, 48, 48]
    salts = [body.get("cache_salt") for body in server.bodies[2:]]
    assert len(set(salts[:5])) == 5 and len(set(salts[5:])) == 1 and None not in salts  # one warmup for each pass
    # Another run finds nothing of this one, although its prompts are the same.
    again, _ = measure_server(server.url, "openai", None, None, load, passes=(False, True), progress=False)
    assert sorted(r["num_cached_tokens"] for r in again[1].requests) == [0, 0, 48, 48]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_conversations_contain_the_answers(server: OpenAIServer, backend: str) -> None:
    load = ServingLoad(GeneratedSharedPrefix(1, 1, 40, 8, output_len=3, num_turns=3))
    result = measure(server, load, backend)
    *_, last = server.bodies
    if backend == "openai-chat":
        assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert last["messages"][1]["content"].split() == ["word"] * 3
    else:
        assert last["prompt"].split()[24:27] == last["prompt"].split()[31:34] == ["word"] * 3
        assert "  " not in last["prompt"]  # the text as it came: the first page of the next turn is a hit
    assert [r["num_cached_tokens"] > 0 for r in result.requests] == [False, True, True]


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
    server: OpenAIServer, fault: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fault, path = fault, tmp_path / "a.json"
    sizes = "--num-prompts 3 --random-input-len 500 --random-output-len 4 --num-warmups 0"
    cli.main(["bench", "serve", "--base-url", f"{server.url}/v1", *sizes.split(), "--json", str(path)])
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"]) == (0, 3) and all(error in r["error"] for r in report["requests"])
    assert f"failed: 3 × {error}" in capsys.readouterr().out
    assert report["server"] == {
        "url": f"{server.url}/v1/completions",
        "backend": "openai",
        "model": "tiny",
        "tokens_a_word": 2.0,
    }
    assert report["options"]["num_warmups"] == 0 and "page_size" not in report["options"]


def test_a_server_without_details_has_no_hit_rate(server: OpenAIServer) -> None:
    server.fault = "no details"
    result = measure(server, ServingLoad(LONG, ignore_eos=False))
    assert result.to_json()["prefix_cache_hit_rate"] is None and result.to_json()["completed"] == 3
    assert "ignore_eos" not in server.bodies[-1]


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_last_token_without_text_counts(server: OpenAIServer, tokens: int) -> None:
    server.fault = "silent end"
    result = measure(server, ServingLoad(RandomPrompts(1, 500, tokens)), "openai-chat")
    assert [(r["output_len"], len(r["itl"]), r["error"]) for r in result.requests] == [(tokens, tokens - 1, None)]


def test_a_conversation_ends_with_its_failure(server: OpenAIServer) -> None:
    server.fault = "refused"
    result = measure(server, ServingLoad(GeneratedSharedPrefix(1, 2, 370, 20, 5, num_turns=3)))
    assert [r["error"] for r in result.requests] == [None, "HTTP 429: too many requests", NOT_SENT] * 2


def test_a_server_is_measured_without_torch() -> None:
    code = "import sys; from dsa_engine import cli; cli.COMMANDS['bench serve'].load()\n"
    code += "import dsa_engine.commands.bench.serving.over_http; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
