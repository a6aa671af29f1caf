"""Limits: sizes, times, waiting requests, the key, the end of the server."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dsa_engine import LLM

LONG = {"prompt": [5, 6], "max_tokens": 190, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def tiny(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(600)


@pytest.fixture
def slow(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine whose steps take 10 ms more, so that a long request takes 2 seconds."""
    step = tiny.engine.step
    monkeypatch.setattr(tiny.engine, "step", lambda: (time.sleep(0.01), step())[1])
    yield tiny
    tiny.wait_idle()
    assert tiny.engine.scheduler.free_pages == [tiny.engine.cache.pages]


def test_size_of_a_body(serve: Any, tiny: LLM) -> None:
    server = serve(tiny, max_body_size="2KiB")
    assert server.complete([5], max_tokens=1)
    message = server.refused("/v1/completions", 413, prompt="a" * 3000)
    assert "2.00 KiB" in message and "--max-body-size" in message
    chunked = server.post("/v1/completions", content=(b" " * 500 for _ in range(5)))  # its length is not announced
    assert chunked.status_code == 413


def test_time_of_a_request(serve: Any, slow: LLM) -> None:
    server = serve(slow, request_timeout=0.2)
    assert "more than 0.2 seconds" in server.refused("/v1/completions", 504, **LONG)
    response = server.post("/v1/completions", json=LONG | {"stream": True})
    events = [line for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["error"]["code"] == "timeout"
    assert server.complete([5], max_tokens=1)


def test_waiting_requests(serve: Any, slow: LLM) -> None:
    """At most 8 run and 2 wait; the 11th is refused, and told to come again."""
    server = serve(slow, max_waiting_requests=2)
    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(lambda _: server.post("/v1/completions", json=LONG | {"max_tokens": 20}), range(20)))
    refused = [one for one in responses if one.status_code == 429]
    assert 10 <= len(refused) < 20 and {one.status_code for one in responses} == {200, 429}
    assert {one.headers["retry-after"] for one in refused} == {"1"}
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    assert server.complete([5], max_tokens=1)


def test_the_key(serve: Any, tiny: LLM) -> None:
    server = serve(tiny, api_key="a secret")
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    for given in (
        {},
        {"Authorization": "a secret"},
        {"Authorization": "Bearer a secres"},
        {"Authorization": "Bearer é"},
    ):
        for path in ("/v1/models", "/metrics"):
            response = server.get(path, headers={key: value.encode() for key, value in given.items()})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert server.get("/v1/models", headers={"Authorization": "Bearer a secret"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("timeout", "signals"), [(20.0, 1), (0.2, 1), (20.0, 2)])
def test_the_end(serve: Any, slow: LLM, timeout: float, signals: int, stream: bool) -> None:
    """What runs ends, or is broken off after the timeout or a second signal; no client can connect any longer."""
    server = serve(slow, shutdown_timeout=timeout)

    def answer() -> str:
        try:
            return server.post("/v1/completions", json=LONG | {"max_tokens": 60, "stream": stream}).text
        except httpx.TransportError:
            return "broken"

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answer)
        while not slow.engine.scheduler.has_work:
            time.sleep(0.01)
        for _ in range(signals):
            server.http.handle_exit(signal.SIGINT, None)
        await_end(server)
        whole = running.result()
    assert ('"finish_reason":"length"' in whole) == (timeout > 1 and signals == 1)


def await_end(server: Any) -> None:
    until = time.monotonic() + 10
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < until:
            httpx.get(f"{server.base_url}/ready", trust_env=False)
            time.sleep(0.02)


def test_an_engine_that_ends(serve: Any, tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests get the error, liveness fails, the server ends and says so."""
    llm = tiny_llm(600)
    server = serve(llm)

    def broken() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
    response = server.post("/v1/completions", json=LONG)
    assert response.status_code >= 500 and "the device is lost" in response.json()["error"]["message"]
    await_end(server)
    assert server.http.failed
    with pytest.raises(RuntimeError):
        llm.close()
        llm.generate([[5]])


def test_what_there_is_not(serve: Any, tiny: LLM) -> None:
    server = serve(tiny)
    assert server.put("/v1/models").json()["error"]["message"] == "/v1/models does not take PUT"
    for path in ("/v1/embeddings", "/v1/audio/speech", "/%ff%fe", "/v1/../../etc/passwd"):
        assert server.post(path, json={}).json()["error"]["type"] == "not_found_error"
    assert "not valid JSON" in server.post("/v1/completions", content=b"{", headers=JSON).json()["error"]["message"]
    for body in (b"\xff", b"[" * 100_000, b"[]", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}"):
        assert server.post("/v1/completions", content=body, headers=JSON).status_code == 400, body[:20]
